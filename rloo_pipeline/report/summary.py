"""Builds summary.json: what a run gained, with intervals and p-values. Nothing in it depends on the clock."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.artifacts import lineage, prompt_counts, tables
from rloo_pipeline.artifacts.files import check_facts, read_artifact
from rloo_pipeline.checks import statistics
from rloo_pipeline.checks.history import Metrics
from rloo_pipeline.checks.statistics import RESAMPLES, Array, Estimate
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.data.prompts_of_round import kept_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.completions import is_correct, score_names, scores_of
from rloo_pipeline.report.origin import versions
from rloo_pipeline.report.run_tables import read_pair
from rloo_pipeline.runtime import late_files
from rloo_pipeline.seeds import derive

Pair = tuple[pa.Table, pa.Table]
"""Completions of the warm start and the final policy, from `read_pair`."""


def summarize_run(config: Config, run: Path) -> dict[str, Any]:
    """Summarizes a finished run, from its files alone."""
    parts = ("distance", "harness") if config.evaluation.harness else ("distance",)
    evaluations = {name: run_files.read_evaluation(run, name, refused=parts) for name in config.evaluated}
    for name, evaluation in evaluations.items():
        folder, policy = run / "evaluation" / name, lineage.named_policy(run, config.evaluated[name])
        check_facts(folder / "summary.json", evaluation, policy, f"delete {folder} and run again")
        if distance := evaluation["distance"]:
            check_facts(folder / "distance.json", distance, {"reference": evaluations["warmstart"]["policy"]})
    rounds = [run_files.read_metrics(run, number) for number in range(1, config.rounds + 1)]
    pair, choice = read_pair(run), _choice(config, run)
    gains = gains_of(config, run, pair)
    others = run_files.read_held_out(run, range(1, config.rounds + 1)) + ([choice["test"]] if choice else [])
    return {
        **_facts(config, rounds, evaluations, others),
        "gain": gains["pass@1"]["value"],
        "gain_ci95": gains["pass@1"]["ci95"],
        "gain_p": gains["pass@1"]["p"],
        "gain_p_holm": gains["pass@1"]["p_holm"],
        "gains": gains,
        "win_rates": win_rates_of(config, pair),
        **({"judged": judged(config, run, pair)} if config.judge else {}),
        "reward": {"first_round": rounds[0]["reward"], "last_round": rounds[-1]["reward"]},
        **choice,
        **({"earlier_versions": earlier} if (earlier := _earlier_versions(run, len(rounds))) else {}),
        **({"training_prompts": chosen} if (chosen := training_prompts(config, run)) else {}),
    }


def _earlier_versions(run: Path, rounds: int) -> dict[str, dict[str, str]]:
    """Package versions during the run that are not those of now: package → version → the first round with it."""
    found, now = dict[str, dict[str, str]](), versions()
    seen = [(record["round"], record.get("versions", {})) for record in _pages(run, rounds)]  # older code wrote none
    # the tables tell of rounds without a page, too
    makers = ((number, lineage.facts_of_round(run, number).get("package_version")) for number in range(1, rounds + 1))
    seen += [(number, {"rloo_pipeline": version}) for number, version in makers if version]
    for number, packages in sorted(seen, key=lambda entry: entry[0]):
        for package, version in packages.items():
            if version != now.get(package):
                found.setdefault(package, {}).setdefault(version, number)
    return found


def _pages(run: Path, rounds: int) -> Iterator[JSON]:
    """The records of the pages that were written after rounds. A damaged one is left out: no result depends on it."""
    for number in range(1, rounds + 1):
        with suppress(UserError):
            if late_files.exists(file := run / "pages" / f"{number:05d}.json"):
                yield read_artifact(file)


def _facts(
    config: Config, rounds: Sequence[Metrics], evaluations: Mapping[str, JSON], others: Sequence[JSON]
) -> dict[str, Any]:
    """The part of the summary that exists at any time. Evaluations of the warm start and final policy are None until
    they are done.

    Args:
        config: the section `report`.
        rounds: metrics.json of the rounds.
        evaluations: evaluations by name.
        others: other evaluations whose tokens count: those of each round, and the test of a choice.
    """
    evaluated = [*evaluations.values(), *others]
    parts = [part for evaluation in evaluated for part in (evaluation, evaluation.get("greedy")) if part]
    return {
        "run": config.run,
        "rounds": len(rounds),
        "seed": config.seed,
        "warmstart": evaluations.get("warmstart"),
        "final": evaluations.get("final"),
        "between": {name: evaluation for name, evaluation in evaluations.items() if name.isdigit()},
        "tokens": {
            "rollouts": sum(int(metrics["num_completion_tokens"] or 0) for metrics in rounds),
            "evaluation": sum(part["num_completion_tokens"] for part in parts),
        },
        "versions": versions(),
    }


def _choice(config: Config, run: Path) -> dict[str, Any]:
    """The selection of a single run on dev, and its test. An experiment has both in its own folder."""
    file = run / "selection.json"
    if config.select is None or not late_files.exists(file):
        return {}
    [chosen] = read_artifact(file)["chosen"]
    check_facts(file, chosen, lineage.named_policy(run, chosen["round"]))
    test = read_artifact(run / "test" / str(config.seed) / "summary.json", evaluated="test", policy=chosen["policy"])
    return {"chosen": chosen, "test": test}


def so_far(config: Config, run: Path) -> dict[str, Any]:
    """The summary so far of a run in progress. `warmstart` is None until that evaluation is done."""
    files = run_files.read(run, config)
    by_number = files.evaluations()
    names = list(config.evaluated.items())[:-1]
    evaluations = {name: by_number[number] for name, number in names if number in by_number}
    return _facts(config, files.rounds, evaluations, files.held_out())


def gains_of(config: Config, run: Path, pair: Pair) -> dict[str, dict[str, Any]]:
    """Differences between final policy and warm start, paired by prompt.

    Args:
        config: the section `report`.
        run: folder of the run, from which greedy completions are read.
        pair: sampled completions of both.

    Returns:
        Gains in pass@k, greedy accuracy, every reward function, length and truncation. `p` is uncorrected, `p_holm` is
        corrected for all these comparisons.
    """
    samples = config.evaluation.num_generations
    # number of independent samples behind each value, if scores have two values
    drawn: dict[str, float] = {f"pass@{k}": samples // k for k in statistics.powers_of_two(samples)}
    drawn["truncated"] = samples
    widths: dict[str, float] = {}
    for name in score_names(config.rewards):
        scores = [scores_of(table, name, samples) for table in pair]
        if values := statistics.two_values(*scores):
            drawn[f"rewards/{name}"], widths[f"rewards/{name}"] = (
                statistics.samples_each(*scores),
                values[1] - values[0],
            )
    before, after = (_values(config, table, samples) for table in pair)
    greedy = read_pair(run, "greedy")
    if len(greedy[0]):
        drawn["greedy"] = 1
        before["greedy"], after["greedy"] = (is_correct(config, table, 1).mean(axis=1) for table in greedy)
    seed = derive(config.seed, "bootstrap")
    gains = {
        name: statistics.gain(before[name], after[name], RESAMPLES, seed, drawn.get(name), widths.get(name, 1.0))
        for name in before
    }
    corrected = statistics.holm({name: paired.p for name, paired in gains.items()})
    return {name: {**paired._asdict(), "p_holm": corrected[name]} for name, paired in gains.items()}


def win_rates_of(config: Config, pair: Pair) -> dict[str, dict[str, Any] | None]:
    """Win rate of the final policy against the warm start, by each reward whose scores are not only 0 and 1. If a
    reward's weight is negative, the lower score wins.
    """
    samples = config.evaluation.num_generations
    rates = {}
    for reward in config.rewards:
        before, after = (scores_of(table, reward.column, samples) for table in pair)
        if not {*np.unique(before[~np.isnan(before)]), *np.unique(after[~np.isnan(after)])} <= {0.0, 1.0}:
            rate = win_rate(before, after) if reward.weight >= 0 else win_rate(-before, -after)
            rates[reward.column] = rate and rate._asdict()
    return rates


def judged(config: Config, run: Path, pair: Pair) -> dict[str, Any]:
    """The judge's win rate of the final policy against the warm start, and the share of pairs with the same verdict in
    both orders. Pairs without two verdicts do not count.

    Raises:
        UserError: the judgements belong to other completions.
    """
    of = {name: tables.footer(table)[tables.DIGEST] for name, table in zip(("warmstart", "final"), pair, strict=True)}
    table = tables.read(run / "judgements.parquet", "judgements", **of)
    verdicts = np.array([table[name].to_numpy() for name in ("final_first", "warmstart_first")], dtype=float)
    rate, same = judged_rate(verdicts.reshape(2, -1, config.evaluation.num_generations))
    return {"rate": rate and rate._asdict(), "same_in_both_orders": same}


def _values(config: Config, table: pa.Table, samples: int) -> dict[str, Array]:
    """The values of a policy to compare, [prompts]; NaN if no sample of the prompt has the reward."""
    values = {f"pass@{k}": passes for k, passes in statistics.pass_at_ks(is_correct(config, table, samples)).items()}
    for name in score_names(config.rewards):
        scores = scores_of(table, name, samples)
        scored, none = (~np.isnan(scores)).sum(axis=1), np.full(len(scores), np.nan)
        values[f"rewards/{name}"] = np.divide(np.nansum(scores, axis=1), scored, out=none, where=scored > 0)
    truncated = [reason != "stop" for reason in table["finish_reason"].to_pylist()]
    for name, of_samples in (("length", tables.sampled_lengths(table)), ("truncated", truncated)):
        values[name] = np.array(of_samples, dtype=np.float64).reshape(-1, samples).mean(axis=1)
    return values


def training_prompts(config: Config, run: Path) -> JSON | None:
    """The training prompts that a run uses, and their difficulty for policy 0 (`dataset.select`).

    Args:
        config: the section `report`.
        run: folder of the run.

    Returns:
        The key `weights` and, if policy 0 was sampled for it, `prompts`, `kept`, `pass_rate` (the range or None),
        `num_generations`, `right` (number of prompts with a pass rate of 0, 1/K, … 1), `between` (number of prompts
        that `right` counts at the nearest of these, since fewer than K completions have scores) and `unscored` (number
        without a pass rate). None if the run does not select prompts, or policy 0 has not been sampled yet.

    Raises:
        UserError: a table is damaged.
    """
    select = config.dataset.select
    if select is None:
        return None
    if not config.measures_difficulty:
        return {"weights": select.weights}
    files = [run / "warmstart" / "difficulty" / f"{shard:03d}.parquet" for shard in range(config.rollout.shards)]
    if not all(map(late_files.exists, files)):
        return None
    counts = list(prompt_counts.read(files, 0).values())
    shares = np.array([counted.pass_rate for counted in counts if counted.samples]) * select.num_generations
    right = np.bincount(shares.round().astype(int), minlength=select.num_generations + 1)
    return {
        "weights": select.weights,
        "prompts": len(counts),
        "kept": len(counts) if select.pass_rate is None else len(kept_rows(counts, select.pass_rate)),
        "pass_rate": select.pass_rate,
        "num_generations": select.num_generations,
        "right": right.tolist(),
        "between": int((~np.isclose(shares, shares.round(), atol=1e-6)).sum()),
        "unscored": len(counts) - len(shares),
    }


def win_rate(before: Array, after: Array) -> Estimate | None:
    """Chance that a completion of one policy scores higher than one of the other for the same prompt; ties count half.

    The rate of a prompt is the mean over all pairs of its scored completions; the interval is over prompts.

    Args:
        before: [prompts, samples] scores of the other policy, NaN where there is none.
        after: [prompts, samples] scores of the policy, NaN where there is none.

    Returns:
        The rate, or None if no prompt has scores of both.
    """
    pairs = after[:, :, None], before[:, None, :]
    differences = np.where(np.isclose(*pairs, rtol=statistics.ROUNDING, atol=0.0), 0.0, np.subtract(*pairs))
    wins = np.where(np.isnan(differences), np.nan, (np.sign(differences) + 1) / 2)
    return _over_prompts(wins.reshape(len(wins), -1), statistics.samples_each(before, after))


def judged_rate(verdicts: Array) -> tuple[Estimate | None, float | None]:
    """Mean verdict over pairs of completions that a judge has compared in both orders.

    Args:
        verdicts: [orders, prompts, samples], how much better the policy's completion is, from 0 to 1; NaN for none.

    Returns:
        The rate, with its interval over prompts, and the share of pairs for which both orders name the same completion
        or neither; both None if no pair has two verdicts.
    """
    both = ~np.isnan(verdicts).any(axis=0)
    named = np.sign(verdicts[:, both] - 0.5)
    same = float((named[0] == named[1]).mean()) if both.any() else None
    of_pairs = verdicts.mean(axis=0)
    return _over_prompts(of_pairs, statistics.samples_each(of_pairs)), same


def _over_prompts(wins: Array, samples: float) -> Estimate | None:
    """The mean over prompts of [prompts, pairs], NaN for pairs that do not count; `samples` of a prompt's pairs are
    independent of each other.
    """
    values = statistics.prompt_means(wins)
    return statistics.estimate_share(values, samples) if len(values) else None
