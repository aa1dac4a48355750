"""summary.json: what a run gained, with intervals and p-values. Nothing in it depends on the clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import check_facts, read_artifact
from rloo_pipeline.config import Config
from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.evaluation.completions import is_correct, scores_of
from rloo_pipeline.evaluation.statistics import Array, Gain, gain, holm, is_share, pass_at_ks, powers_of_two
from rloo_pipeline.report.evaluations import read_pair
from rloo_pipeline.report.origin import versions
from rloo_pipeline.report.training_prompts import training_prompts
from rloo_pipeline.seeds import derive


class Measure(NamedTuple):
    """A value per prompt in which two policies are compared."""

    of: Callable[[pa.Table], Array]
    """Table of completions → [prompts]."""
    samples: int | None
    """Independent samples behind each value if the values are shares, else None."""


def summarize_run(config: Config, run: Path) -> dict[str, Any]:
    """The summary of a finished run, from its files alone."""
    parts = ("distance", "harness") if config.evaluation.harness else ("distance",)
    evaluations = {name: run_files.read_evaluation(run, name, refused=parts) for name in config.evaluated}
    for name, evaluation in evaluations.items():
        if distance := evaluation["distance"]:
            file = run / "evaluation" / name / "distance.json"
            check_facts(file, distance, {"reference": evaluations["warmstart"]["policy"]})
    rounds = [run_files.read_metrics(run, number) for number in range(1, config.rounds + 1)]
    gains = gains_of(config, run)
    return {
        "run": config.run,
        "rounds": config.rounds,
        "seed": config.seed,
        "warmstart": evaluations["warmstart"],
        "final": evaluations["final"],
        "gain": gains["pass@1"]["value"],
        "gain_ci95": gains["pass@1"]["ci95"],
        "gain_p": gains["pass@1"]["p"],
        "gain_p_holm": gains["pass@1"]["p_holm"],
        "gains": gains,
        "between": {name: evaluation for name, evaluation in evaluations.items() if name.isdigit()},
        "reward": {"first_round": rounds[0]["reward"], "last_round": rounds[-1]["reward"]},
        "tokens": {
            "rollouts": sum(metrics["num_completion_tokens"] for metrics in rounds),
            "evaluation": sum(evaluation["num_completion_tokens"] for evaluation in evaluations.values()),
        },
        "versions": versions(),
        **_choice(config, run),
        **({"training_prompts": chosen} if (chosen := training_prompts(config, run)) else {}),
    }


def _choice(config: Config, run: Path) -> dict[str, Any]:
    """What a single run chose on dev, and its test; an experiment has both in its own folder."""
    file = run / "selection.json"
    if config.select is None or not file.exists():
        return {}
    [chosen] = read_artifact(file)["chosen"]
    test = read_artifact(run / "test" / str(config.seed) / "summary.json", evaluated="test", policy=chosen["policy"])
    return {"chosen": chosen, "test": test}


def so_far(config: Config, run: Path) -> dict[str, Any]:
    """The part of the summary that a run in flight has; `warmstart` is None until that evaluation is done."""
    files = run_files.read(run, config)
    by_number = files.evaluations()
    names = list(config.evaluated.items())[:-1]
    evaluations = {name: by_number[number] for name, number in names if number in by_number}
    return {
        "run": config.run,
        "rounds": len(files.rounds),
        "seed": config.seed,
        "warmstart": evaluations.get("warmstart"),
        "final": None,
        "between": {name: evaluation for name, evaluation in evaluations.items() if name.isdigit()},
        "tokens": {
            "rollouts": sum(int(metrics["num_completion_tokens"] or 0) for metrics in files.rounds),
            "evaluation": sum(evaluation["num_completion_tokens"] for evaluation in evaluations.values()),
        },
        "versions": versions(),
    }


def gains_of(config: Config, run: Path) -> dict[str, dict[str, Any]]:
    """Final policy less warm start, paired by prompt.

    Returns:
        Gains of pass@k, greedy accuracy, every reward function, length and truncation. `p` is that of the comparison
        alone, `p_holm` is corrected for all of them.
    """
    samples = config.evaluation.num_generations
    functions = [*(reward.column for reward in config.rewards), "reward"]
    before, after = read_pair(run)
    measures = {f"pass@{k}": _pass_at(config, samples, k) for k in powers_of_two(samples)}
    for name in functions:
        shares = is_share(*(scores_of(table, name, samples) for table in (before, after)))
        measures[f"rewards/{name}"] = Measure(_mean_of(name, samples), samples if shares else None)
    measures |= {"length": Measure(_length(samples), None), "truncated": Measure(_truncated(samples), samples)}
    gains = _paired(config, before, after, measures)
    gains |= _paired(config, *read_pair(run, "greedy"), {"greedy": _pass_at(config, 1, 1)})
    corrected = holm({name: paired.p for name, paired in gains.items()})
    return {name: {**paired._asdict(), "p_holm": corrected[name]} for name, paired in gains.items()}


def _paired(config: Config, before: pa.Table, after: pa.Table, measures: dict[str, Measure]) -> dict[str, Gain]:
    """The gains on one kind of completions; none if the tables are empty."""
    if not len(before):
        return {}
    resamples, seed = config.evaluation.bootstrap_samples, derive(config.seed, "bootstrap")
    return {
        name: gain(measure.of(before), measure.of(after), resamples, seed, measure.samples)
        for name, measure in measures.items()
    }


def _pass_at(config: Config, samples: int, k: int) -> Measure:
    return Measure(
        lambda table: pass_at_ks(is_correct(table, config.rewards, config.correct, samples))[k], samples // k
    )


def _mean_of(name: str, samples: int) -> Callable[[pa.Table], Array]:
    """Mean over a prompt's scorable samples, NaN if there is none."""

    def mean(table: pa.Table) -> Array:
        values = scores_of(table, name, samples)
        scored = ~np.isnan(values)
        total, count = np.where(scored, values, 0.0).sum(axis=1), scored.sum(axis=1)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    return mean


def _length(samples: int) -> Callable[[pa.Table], Array]:
    return lambda table: _mean_by_prompt(tables.sampled_lengths(table), samples)


def _truncated(samples: int) -> Callable[[pa.Table], Array]:
    return lambda table: _mean_by_prompt([reason != "stop" for reason in table["finish_reason"].to_pylist()], samples)


def _mean_by_prompt(values: list[int] | list[bool], samples: int) -> Array:
    means: Array = np.array(values, dtype=np.float64).reshape(-1, samples).mean(axis=1)
    return means
