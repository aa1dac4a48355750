"""Metrics of completion lengths, of a round or an evaluation, over the tokens that the model sampled (as in TRL)."""

import statistics

import pyarrow as pa

from rloo_pipeline.artifacts import tables


def length_metrics(rollouts: pa.Table) -> dict[str, float | int | None]:
    """Length statistics in tokens for all completions and for those with an end token, and the share without one."""
    lengths = tables.sampled_lengths(rollouts)
    reasons = rollouts["finish_reason"].to_pylist()
    ended = [length for length, reason in zip(lengths, reasons, strict=True) if reason == "stop"]
    return {
        "completions/mean_length": statistics.fmean(lengths) if lengths else None,
        "completions/min_length": min(lengths, default=None),
        "completions/max_length": max(lengths, default=None),
        "completions/mean_terminated_length": statistics.fmean(ended) if ended else None,
        "completions/min_terminated_length": min(ended, default=None),
        "completions/max_terminated_length": max(ended, default=None),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths) if lengths else None,
        "num_completion_tokens": sum(lengths),
    }
