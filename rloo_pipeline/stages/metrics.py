"""What metrics.json says of a round's samples, under TRL's names; values that do not exist (no scorable row) are
null.
"""

from __future__ import annotations

import math
import statistics

import pyarrow as pa

from rloo_pipeline import tables

Metrics = dict[str, float | int | None]


def round_metrics(rolled: pa.Table, scored: pa.Table, train: pa.Table, samples: int) -> Metrics:
    """Rewards, groups, lengths and KL of one round."""
    functions = [
        name for name in scored.column_names if name not in {*(field.name for field in tables.KEYS), "reward", "error"}
    ]
    metrics: Metrics = {}
    for function in functions:
        values = _known(scored[function])
        metrics[f"rewards/{function}/mean"], metrics[f"rewards/{function}/std"] = _mean(values), _std(values)
    rewards = train["reward"].to_pylist()
    groups = [[r for r in rewards[i : i + samples] if r is not None] for i in range(0, len(rewards), samples)]
    metrics["reward"] = _mean(_known(train["reward"]))
    metrics["reward_std"] = _mean([statistics.stdev(group) for group in groups if len(group) > 1])
    metrics["frac_reward_zero_std"] = sum(len(set(group)) < 2 for group in groups) / len(groups)
    metrics["unscorable"] = sum(reward is None for reward in scored["reward"].to_pylist())
    metrics["kl"] = _mean(_known(train["kl"]))
    return metrics | length_metrics(rolled)


def length_metrics(rolled: pa.Table) -> Metrics:
    """Lengths of completions, all and those that ended by themselves, and the share that did not."""
    lengths = [len(ids) for ids in rolled["completion_ids"].to_pylist()]
    reasons = rolled["finish_reason"].to_pylist()
    ended = [length for length, reason in zip(lengths, reasons, strict=True) if reason == "stop"]
    return {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/mean_terminated_length": _mean([float(length) for length in ended]),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "num_tokens": sum(lengths) + sum(len(ids) for ids in rolled["prompt_ids"].to_pylist()),
        "num_completion_tokens": sum(lengths),
    }


def _known(column: pa.ChunkedArray) -> list[float]:
    return [value for value in column.to_pylist() if value is not None and math.isfinite(value)]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
