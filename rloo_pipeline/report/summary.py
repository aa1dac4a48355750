"""summary.json: what a run gained, with intervals and p-values, and how far it went. Nothing in it is of the clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.diagnosis.run_files import metrics_of
from rloo_pipeline.evaluation import completions as seen
from rloo_pipeline.evaluation.statistics import Array, Gain, gain, holm, is_share, pass_at_ks
from rloo_pipeline.report.origin import versions
from rloo_pipeline.seeds import derive


class Measure(NamedTuple):
    """What is compared, prompt by prompt."""

    of: Callable[[pa.Table], Array]
    """A table of completions → one value a prompt."""
    samples: int | None
    """Independent samples behind each, where the values are shares."""


def summarize(config: Config, run: Path) -> dict[str, Any]:
    """The summary of a finished run, from its files alone."""
    evaluations = {name: read_evaluation(run, name) for name in config.evaluated}
    rounds = [read_json(metrics_of(run, number)) for number in range(1, config.rounds + 1)]
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
        "between": {name: found for name, found in evaluations.items() if name.isdigit()},
        "reward": {"first_round": rounds[0]["reward"], "last_round": rounds[-1]["reward"]},
        "tokens": {
            "rollouts": sum(metrics["num_completion_tokens"] for metrics in rounds),
            "evaluation": sum(found["num_completion_tokens"] for found in evaluations.values()),
        },
        "versions": versions(),
    }


def read_evaluation(run: Path, name: str) -> JSON:
    """summary.json of an evaluation, with `distance` (KL from policy 0) and `harness` (lm-eval) where there are any."""
    folder = run / "evaluation" / name
    found: JSON = read_json(folder / "summary.json")
    for more in ("distance", "harness"):
        file = folder / f"{more}.json"
        found[more] = read_json(file) if file.exists() else None
    return found


def gains_of(config: Config, run: Path) -> dict[str, dict[str, Any]]:
    """Final policy less warm start, prompt by prompt: pass@k, greedy, every reward function, length and truncation. `p`
    is of each comparison by itself, `p_holm` is corrected for there being all of them.
    """
    samples = config.evaluation.num_generations
    functions = [*(reward.column for reward in config.rewards), "reward"]
    ks = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    before, after = _pair(run, "completions.parquet")
    measures = {f"pass@{k}": _pass_at(config, samples, k) for k in ks}
    for name in functions:
        shares = is_share(*(seen.grid(table[name], samples) for table in (before, after)))
        measures[f"rewards/{name}"] = Measure(_mean_of(name, samples), samples if shares else None)
    measures |= {"length": Measure(_length(samples), None), "truncated": Measure(_truncated(samples), samples)}
    found = _paired(config, before, after, measures)
    found |= _paired(config, *_pair(run, "greedy.parquet"), {"greedy": _pass_at(config, 1, 1)})
    corrected = holm({name: one.p for name, one in found.items()})
    return {name: {**one._asdict(), "p_holm": corrected[name]} for name, one in found.items()}


def _pair(run: Path, file: str) -> tuple[pa.Table, pa.Table]:
    """The warm start's completions and the final policy's, of the same prompts."""
    paths = [run / "evaluation" / name / file for name in ("warmstart", "final")]
    before, after = (tables.read(path, "completions") for path in paths)
    tables.check_aligned(before, after, str(paths[1]))
    return before, after


def _paired(config: Config, before: pa.Table, after: pa.Table, measures: dict[str, Measure]) -> dict[str, Gain]:
    """The gains on one kind of completions; none where there are none."""
    if not len(before):
        return {}
    resamples, seed = config.evaluation.bootstrap_samples, derive(config.seed, "bootstrap")
    return {
        name: gain(made.of(before), made.of(after), resamples, seed, made.samples) for name, made in measures.items()
    }


def _pass_at(config: Config, samples: int, k: int) -> Measure:
    return Measure(
        lambda table: pass_at_ks(seen.right(table, config.rewards, config.correct, samples))[k], samples // k
    )


def _mean_of(name: str, samples: int) -> Callable[[pa.Table], Array]:
    """Mean over a prompt's scorable samples, NaN where there is none."""

    def mean(table: pa.Table) -> Array:
        values = seen.grid(table[name], samples)
        known = ~np.isnan(values)
        total, count = np.where(known, values, 0.0).sum(axis=1), known.sum(axis=1)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    return mean


def _length(samples: int) -> Callable[[pa.Table], Array]:
    return lambda table: (
        np.array([len(ids) for ids in table["completion_ids"].to_pylist()], dtype=np.float64)
        .reshape(-1, samples)
        .mean(axis=1)
    )


def _truncated(samples: int) -> Callable[[pa.Table], Array]:
    return lambda table: (
        np.array([float(reason != "stop") for reason in table["finish_reason"].to_pylist()])
        .reshape(-1, samples)
        .mean(axis=1)
    )
