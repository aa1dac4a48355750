"""Builds comparison.json: finished runs side by side, with everything a reader must know before believing a difference.

The first run is the baseline. Two final policies that answered the same held-out prompts are compared prompt by prompt.
Interval and p-value describe these two policies on other prompts of the same kind, not what training with another seed
would give. With several runs, p-values are corrected for multiple comparisons (Holm).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_pipeline.checks.statistics import RESAMPLES, gain, holm
from rloo_pipeline.config import JSON, flatten
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.finished import FinishedRun
from rloo_pipeline.report.jobs import STAGES_OF_ROUND
from rloo_pipeline.seeds import derive


class Fact(NamedTuple):
    """A property that runs must share before their differences can be attributed to the algorithm."""

    name: str
    value_of: Callable[[FinishedRun], Any]
    """Function that returns the property's value in a run, as JSON."""
    text_of: Callable[[Any], str]
    """Function that returns a short text for a value; different values may have the same text."""
    consequence: str
    """Consequence of a difference between the runs."""


def _prompts(ids: list[str]) -> str:
    return f"{len(ids):,} (digest {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]})"


def _definition_of_right(run: FinishedRun) -> JSON:
    """The reward function that decides what counts as right, with its options and threshold."""
    reward = run.config.deciding_reward
    return {"function": reward.function, "options": reward.options, "threshold": run.config.correct.threshold}


def _sampling(run: FinishedRun) -> JSON:
    final, config = run.summary["final"], run.config
    kwargs = config.rollout.generation_kwargs
    return {
        "samples": final["num_generations"],
        "temperature": final["temperature"],
        "longest": config.longest_evaluated,
        "kwargs": kwargs.for_vllm if kwargs else {},
    }


FACTS = (
    Fact(
        "warm start",
        lambda run: run.summary["warmstart"]["policy"],
        lambda digest: f"policy 0 {digest[:12]}…",
        "a difference at the end may come from the different starts; compare the gains",
    ),
    Fact(
        "seed",
        lambda run: run.config.seed,
        str,
        "prompts came in another order and samples were drawn with other seeds, which alone makes a difference",
    ),
    Fact("training prompts", lambda run: run.training_prompts, _prompts, "they learned from different problems"),
    Fact("held-out prompts", lambda run: run.held_out_prompts, _prompts, "their accuracies are of different problems"),
    Fact(
        "rewards",
        lambda run: [reward.model_dump(mode="json", exclude={"name"}) for reward in run.config.rewards],
        lambda rewards: " + ".join(
            f"{reward['weight']:g} × {reward['function'].rpartition(':')[2]}" for reward in rewards
        ),
        "their reward curves do not measure the same thing",
    ),
    Fact(
        "code and models of your rewards",
        lambda run: run.functions,
        lambda digests: ", ".join(f"{name} {digest[:8]}" for name, digest in digests.items()) or "not recorded",
        "scores and accuracies may not measure the same thing",
    ),
    Fact(
        "definition of right",
        _definition_of_right,
        lambda value: f"{value['function'].rpartition(':')[2]} ≥ {value['threshold']:g}",
        "accuracy does not mean the same in all of them",
    ),
    Fact(
        "sampling in evaluations",
        _sampling,
        lambda value: ", ".join(
            [
                *(f"{value['samples']} per prompt", f"temperature {value['temperature']:g}"),
                *(f"{value['longest']} tokens", *value["kwargs"]),
            ]
        ),
        "the policies were not evaluated in the same way",
    ),
    Fact(
        "software",
        lambda run: run.summary["versions"],
        lambda value: ", ".join(f"{name} {value[name]}" for name in ("rloo_pipeline", "torch") if name in value),
        "different versions may round and sample differently",
    ),
)
COMPARABLE: Mapping[str, Callable[[FinishedRun], Any]] = {
    "other held-out prompts": lambda run: run.held_out_prompts,
    "another definition of right": _definition_of_right,
    "another temperature, length or generation_kwargs in evaluations": lambda run: {**_sampling(run), "samples": None},
}
"""Properties that runs must share for their accuracies to be subtracted, keyed by the reason given if they do not. The
version of the deciding reward is another, see `incomparable`.
"""


def compare(runs: Sequence[FinishedRun]) -> JSON:
    """Builds the content of comparison.json.

    Raises:
        UserError: there are fewer than two runs, or two of them have the same name.
    """
    names = [run.name for run in runs]
    if len(runs) < 2:
        raise UserError(f"a comparison needs at least two runs, got {' and '.join(names) or 'none'}; name another")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two of the runs are named '{twice}'; name each folder once, and give each run its own `run`")
    return {
        "runs": _rows(runs),
        "shared": {fact.name: shared(fact, runs) for fact in FACTS},
        "differing": differing({run.name: run.config.model_dump(mode="json") for run in runs}),
    }


def _rows(runs: Sequence[FinishedRun]) -> list[JSON]:
    """One row per run."""
    rows = [_row(runs[0], run) for run in runs]
    corrected = holm({row["run"]: row["difference"]["p"] for row in rows[1:]})
    for row in rows[1:]:
        row["difference"]["p_holm"] = corrected[row["run"]]
    return rows


def _row(first: FinishedRun, run: FinishedRun) -> JSON:
    summary, algorithm = run.summary, run.config.algorithm
    keys = ("preset", "advantage", "importance_sampling_level", "clip", "loss_agg_mode", "beta")
    ends = {
        end: {key: summary[end][key] for key in ("accuracy", "ci95", "prompts", "policy")}
        for end in ("warmstart", "final")
    }
    kl = {"kl_placement": algorithm.kl.placement, "kl_estimator": algorithm.kl.estimator}
    return {
        "run": run.name,
        "algorithm": {key: getattr(algorithm, key) for key in keys} | kl,
        "seed": run.config.seed,
        "rounds": run.config.rounds,
        **ends,
        "gain": summary["gain"],
        "gain_ci95": summary["gain_ci95"],
        "difference": None if run is first else difference(first, run),
        "tokens": summary["tokens"]["rollouts"],
        "seconds": round(sum(run.seconds.get(stage, 0.0) for stage in STAGES_OF_ROUND), 1),
    }


def incomparable(runs: Sequence[FinishedRun], across_seeds: bool = False) -> str | None:
    """Explains why the accuracies of these runs are not comparable; None if they are.

    Args:
        runs: the runs.
        across_seeds: accept that each seed has trained its own reward model, which all runs with this seed share.
    """
    for reason, value_of in COMPARABLE.items():
        if any(value_of(run) != value_of(runs[0]) for run in runs):
            return reason
    versions: dict[int | None, set[str | None]] = {}
    for run in runs:
        reward, version = run.config.deciding_reward, run.functions.get(run.deciding)
        if version or not reward.is_model:  # an earlier release may not have recorded a model's
            versions.setdefault(run.config.seed if across_seeds and reward.uses_own_model else None, set()).add(version)
    return "another version of the reward functions" if any(len(of) > 1 for of in versions.values()) else None


def difference(first: FinishedRun, run: FinishedRun) -> JSON:
    """Final accuracy minus that of the first run, with 95% interval and p-value; or the reason why they cannot be
    subtracted.

    If one run has more samples of each prompt, only as many as the other has count. The means of one and of 16 samples
    have different distributions, and a sign-flip test of equally good policies would be below 5% in up to 37% of cases.
    """
    if reason := incomparable([first, run]):
        return {"value": None, "ci95": None, "p": None, "reason": reason}
    samples = min(first.right.shape[1], run.right.shape[1])
    before, after = (of.right[:, :samples].mean(axis=1) for of in (first, run))
    paired = gain(before, after, RESAMPLES, derive(first.config.seed, "comparison"), samples)
    return {"value": paired.value, "ci95": paired.ci95, "p": paired.p, "reason": None}


def shared(fact: Fact, runs: Sequence[FinishedRun]) -> JSON:
    """Compares a property of several runs. `said` is the value that they share, or their values and what follows."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(fact.value_of(run), sort_keys=True), []).append(run)
    texts = {", ".join(run.name for run in group): fact.text_of(fact.value_of(group[0])) for group in groups.values()}
    if len(texts) == 1:
        return {"same": True, "said": next(iter(texts.values()))}
    distinct = len(set(texts.values())) == len(texts)
    values = "; ".join(f"{names}: {value}" if distinct else names for names, value in texts.items())
    return {"same": False, "said": f"{values}. So {fact.consequence}."}


def differing(configs: Mapping[str, JSON]) -> dict[str, dict[str, Any]]:
    """The keys in which configurations differ: key → run → value, which is None if a run lacks the key.

    The run's name and its section `report` are left out.
    """
    flat = {name: flatten(_by_name(config)) for name, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    by_key = {key: {name: values.get(key) for name, values in flat.items()} for key in keys}
    return {
        key: values
        for key, values in by_key.items()
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1
        and not any(other.startswith(f"{key}.") for other in keys)
    }


def _by_name(config: JSON) -> JSON:
    """The configuration without name and report, and with reward functions keyed by name instead of listed."""
    rewards = {
        reward["name"] or reward["function"].rpartition(":")[2]: {k: v for k, v in reward.items() if k != "name"}
        for reward in config["rewards"]
    }
    return {key: value for key, value in config.items() if key not in ("run", "report")} | {"rewards": rewards}
