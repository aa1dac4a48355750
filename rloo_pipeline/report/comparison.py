"""comparison.json: finished runs side by side, and what a reader must know before he believes a difference.

The first run is the one that the others are compared with. Two final policies that were asked the same held-out
prompts are compared prompt by prompt; interval and p-value speak of these policies on other prompts of the kind, not of
what training with another seed would give. The p-values of several runs are corrected for their number (Holm).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError
from rloo_pipeline.evaluation.statistics import gain, holm
from rloo_pipeline.report.finished import Finished
from rloo_pipeline.seeds import derive

ROUND_STAGES = ("rollout", "score", "reference", "update")
"""Stages whose time is a run's own: what comes before may come from a cache, what comes after is the same for all."""


class Fact(NamedTuple):
    """Something that runs should share if their results are to speak of the algorithm."""

    what: str
    of: Callable[[Finished], Any]
    """Its value in a run, as JSON."""
    shown: Callable[[Any], str]
    """A value in a few words, or nothing where it takes more."""
    otherwise: str
    """What follows where the runs do not share it."""


def _prompts(ids: list[str]) -> str:
    return f"{len(ids):,} (digest {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]})"


def _right(run: Finished) -> JSON:
    """What counts as right: the deciding function and its threshold."""
    reward = next(reward for reward in run.config.rewards if reward.column == run.deciding)
    return {"function": reward.function, "options": reward.options, "threshold": run.config.correct.threshold}


def _sampling(run: Finished) -> JSON:
    longest = run.config.evaluation.max_completion_length or run.config.rollout.max_completion_length
    settings = run.summary["final"]
    return {"samples": settings["num_generations"], "temperature": settings["temperature"], "longest": longest}


FACTS = (
    Fact(
        "warm start",
        lambda run: run.summary["warmstart"]["policy"],
        lambda digest: f"policy 0 {digest[:12]}…",
        "a difference at the end may come from where a run began; compare the gains",
    ),
    Fact(
        "seed",
        lambda run: run.config.seed,
        str,
        "prompts came in another order and samples were drawn with other seeds, which alone makes a difference",
    ),
    Fact("training prompts", lambda run: run.trained, _prompts, "they learned from other problems"),
    Fact("held-out prompts", lambda run: run.asked, _prompts, "their accuracies are of other problems"),
    Fact(
        "rewards",
        lambda run: [reward.model_dump(mode="json", exclude={"name"}) for reward in run.config.rewards],
        lambda rewards: " + ".join(
            f"{reward['weight']:g} × {reward['function'].rpartition(':')[2]}" for reward in rewards
        ),
        "the curves of the reward do not measure the same",
    ),
    Fact(
        "definition of right",
        _right,
        lambda found: f"{found['function'].rpartition(':')[2]} ≥ {found['threshold']:g}",
        "accuracy is not the same thing in all of them",
    ),
    Fact(
        "sampling in evaluations",
        _sampling,
        lambda found: f"{found['samples']} a prompt, temperature {found['temperature']:g}, {found['longest']} tokens",
        "the policies were not asked in the same way",
    ),
    Fact(
        "software",
        lambda run: run.summary["versions"],
        lambda found: ", ".join(f"{name} {found[name]}" for name in ("rloo_pipeline", "torch") if name in found),
        "other versions round and sample in other ways",
    ),
)
COMPARABLE = {"held-out prompts": "other held-out prompts", "definition of right": "another definition of right"}
"""What two accuracies need in common to be subtracted, and what is said where they have not."""


def compare(runs: Sequence[Finished]) -> JSON:
    """Everything that is said of the runs, apart from their curves.

    Raises:
        UserError: fewer than two runs, or two of one name.
    """
    names = [run.name for run in runs]
    if len(runs) < 2:
        raise UserError(f"a comparison needs at least two runs, here is {' and '.join(names) or 'none'}; name another")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two of the runs are named '{twice}'; name each folder once, and give each run its own `run`")
    return {
        "runs": _rows(runs),
        "shared": {fact.what: shared(fact, runs) for fact in FACTS},
        "differing": differing({run.name: run.config.model_dump(mode="json") for run in runs}),
    }


def _rows(runs: Sequence[Finished]) -> list[JSON]:
    """One row a run."""
    rows = [_row(runs[0], run) for run in runs]
    corrected = holm({row["run"]: row["difference"]["p"] for row in rows[1:]})
    for row in rows[1:]:
        row["difference"]["p_holm"] = corrected[row["run"]]
    return rows


def _row(first: Finished, run: Finished) -> JSON:
    """One run."""
    summary, algorithm = run.summary, run.config.algorithm
    keys = ("preset", "advantage", "importance_sampling_level", "clip", "loss_agg_mode", "beta")
    ends = {
        end: {key: summary[end][key] for key in ("accuracy", "ci95", "prompts", "policy")}
        for end in ("warmstart", "final")
    }
    return {
        "run": run.name,
        "algorithm": {key: getattr(algorithm, key) for key in keys} | {"kl_placement": algorithm.kl.placement},
        "seed": run.config.seed,
        "rounds": run.config.rounds,
        **ends,
        "gain": summary["gain"],
        "gain_ci95": summary["gain_ci95"],
        "difference": None if run is first else difference(first, run),
        "tokens": summary["tokens"]["rollouts"],
        "seconds": round(sum(run.seconds.get(stage, 0.0) for stage in ROUND_STAGES), 1),
    }


def difference(first: Finished, run: Finished) -> JSON:
    """Final accuracy less that of the first run, with its 95% interval and p-value, or why there is none."""
    for fact in FACTS:
        if fact.what in COMPARABLE and fact.of(first) != fact.of(run):
            return {"value": None, "ci95": None, "p": None, "reason": COMPARABLE[fact.what]}
    settings = first.config.evaluation
    seed = derive(first.config.seed, "comparison")
    samples = min(settings.num_generations, run.config.evaluation.num_generations)
    found = gain(first.accuracy, run.accuracy, settings.bootstrap_samples, seed, samples)
    return {"value": found.value, "ci95": found.ci95, "p": found.p, "reason": None}


def shared(fact: Fact, runs: Sequence[Finished]) -> JSON:
    """Whether the runs share something, and what: the value that they share, or who has which and what follows."""
    groups: dict[str, list[Finished]] = {}
    for run in runs:
        groups.setdefault(json.dumps(fact.of(run), sort_keys=True), []).append(run)
    found = {", ".join(run.name for run in group): fact.shown(fact.of(group[0])) for group in groups.values()}
    if len(found) == 1:
        return {"same": True, "said": next(iter(found.values()))}
    told = len(set(found.values())) == len(found)
    who = "; ".join(f"{names}: {value}" if told else names for names, value in found.items())
    return {"same": False, "said": f"{who}. So {fact.otherwise}."}


def differing(configs: Mapping[str, JSON]) -> dict[str, dict[str, Any]]:
    """The keys on which the configurations differ: key → run → value, None where a run has no such key.

    The name of a run and what only its page says are left out.
    """
    flat = {name: _flat(_by_name(config)) for name, config in configs.items()}
    keys = dict.fromkeys(key for found in flat.values() for key in found)
    made = {key: {name: found.get(key) for name, found in flat.items()} for key in keys}
    return {
        key: values
        for key, values in made.items()
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1
        and not any(other.startswith(f"{key}.") for other in keys)
    }


def _by_name(config: JSON) -> JSON:
    """The configuration without its name and page, and its reward functions by name rather than in a list."""
    rewards = {
        reward["name"] or reward["function"].rpartition(":")[2]: {k: v for k, v in reward.items() if k != "name"}
        for reward in config["rewards"]
    }
    return {key: value for key, value in config.items() if key not in ("run", "report")} | {"rewards": rewards}


def _flat(value: JSON, above: str = "") -> dict[str, Any]:
    """Keys of all depths, joined by dots."""
    made: dict[str, Any] = {}
    for key, inner in value.items():
        made |= _flat(inner, f"{above}{key}.") if isinstance(inner, dict) and inner else {f"{above}{key}": inner}
    return made
