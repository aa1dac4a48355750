"""What metrics.json says of a round, under TRL's names; values that do not exist (no scorable row) are null.

Rewards and lengths are those of all completions that were sampled, before any was left out of the update. Means over
tokens weigh every token alike, as TRL's do.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.training.lengths import length_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_pipeline.algorithm.mismatch import Gap
    from rloo_pipeline.config import Algorithm
    from rloo_pipeline.training.batch import Batch
    from rloo_pipeline.training.objective import Record

Metrics = dict[str, float | int | None]


def sample_metrics(rolled: pa.Table, scored: pa.Table, samples: int) -> Metrics:
    """Rewards, groups and lengths of what a round sampled."""
    own = {field.name for field in (*tables.KEYS, *tables.SCORED)}
    functions = [name for name in scored.column_names if name not in own]
    metrics: Metrics = {}
    for function in functions:
        values = _known(scored[function])
        metrics[f"rewards/{function}/mean"], metrics[f"rewards/{function}/std"] = _mean(values), _std(values)
        metrics[f"rewards/{function}/none"] = len(scored) - len(values)
    rewards = scored["reward"].to_pylist()
    groups = [{r for r in rewards[i : i + samples] if r is not None} for i in range(0, len(rewards), samples)]
    known = _known(scored["reward"])
    metrics["reward"], metrics["reward_std"] = _mean(known), _std(known)
    metrics["frac_reward_zero_std"] = sum(len(group) < 2 for group in groups) / len(groups)
    metrics["unscorable"] = len(rewards) - len(known)
    metrics["scoring_errors"] = len(rewards) - scored["error"].null_count
    return metrics | length_metrics(rolled)


def update_metrics(batch: Batch, record: Record, algorithm: Algorithm, ratio_is_known: bool) -> Metrics:
    """What the optimizer steps did and saw: KL, entropy, ratios and clips, sampler against trainer."""
    lengths = batch.completions.mask.sum(-1)
    seen = record.seen > 0
    tokens = lengths * record.seen
    actions = tokens if algorithm.importance_sampling_level == "token" else record.seen
    metrics: Metrics = {
        "shaped_reward": _value(batch.rewards.nanmean()),
        "beta": batch.beta,
        "entropy": _ratio(record.entropy.sum(), tokens.sum()),
        "ratio/mean": _ratio((record.ratio * record.seen).sum(), record.seen.sum()) if ratio_is_known else None,
        "clip_ratio/low_mean": _ratio((record.low * actions).sum(), actions.sum()),
        "clip_ratio/high_mean": _ratio((record.high * actions).sum(), actions.sum()),
        "clip_ratio/region_mean": _ratio(((record.low + record.high) * actions).sum(), actions.sum()),
        "trained_completions": int(seen.sum()),
    }
    metrics |= _kl_metrics(batch, record, lengths) | _gap_metrics(batch, record, lengths)
    return metrics | _weight_metrics(record, tokens, algorithm.mismatch.correction)


def kl_of_completion(batch: Batch, record: Record) -> float | None:
    """The mean KL of a completion in nats, from the reward or the loss; None where there is no reference."""
    if batch.completions.reference_logps is None:
        return None
    kl, counted = (record.kl, record.seen > 0) if batch.kl is None else (batch.kl, ~batch.masked)
    return _value(kl[counted].mean())


def _kl_metrics(batch: Batch, record: Record, lengths: Tensor) -> Metrics:
    """KL a token (TRL's kl) and a completion."""
    per_completion = kl_of_completion(batch, record)
    if per_completion is None:
        return {"kl": None, "kl/sequence_mean": None}
    kl, counted = (record.kl, record.seen > 0) if batch.kl is None else (batch.kl, ~batch.masked)
    return {"kl": _ratio(kl[counted].sum(), lengths[counted].sum()), "kl/sequence_mean": per_completion}


def _gap_metrics(batch: Batch, record: Record, lengths: Tensor) -> Metrics:
    """Sampler against trainer: over all completions where a pass for old log-probs was made, else those of the first
    step, which saw them with the weights that sampled.
    """
    found, counted = gap_of(batch, record)
    log_weights = found.log_weight[counted]
    tokens = lengths[counted].sum()
    some = len(log_weights) > 0
    return {
        "sampling/sampling_logp_difference/mean": _ratio(found.absolute[counted].sum(), tokens),
        "sampling/sampling_logp_difference/max": _value(found.largest[counted].max()) if some else None,
        "sampling/importance_sampling_ratio/min": _value(log_weights.min().exp()) if some else None,
        "sampling/importance_sampling_ratio/mean": _value(log_weights.exp().mean()) if some else None,
        "sampling/importance_sampling_ratio/max": _value(log_weights.max().exp()) if some else None,
        "sampling/kl": _ratio(found.kl[counted].sum(), tokens),
        "sampling/outside_band": _ratio(found.outside[counted].sum(), tokens),
        "sampling/effective_sample_size": _effective(log_weights) if some else None,
    }


def _weight_metrics(record: Record, tokens: Tensor, correction: str) -> Metrics:
    """Of the mismatch weights that losses were multiplied by, under TRL's names: of tokens or of completions, as the
    correction has it; and the share that it truncated or dropped.
    """
    if correction == "none":
        return {"sampling/outside_thresholds": None}
    seen = record.seen > 0
    least, mean, largest = record.weight[seen].unbind(-1)
    actions = (tokens if correction.startswith("token") else record.seen)[seen]
    some = len(least) > 0
    return {
        "sampling/importance_sampling_ratio/min": _value(least.min()) if some else None,
        "sampling/importance_sampling_ratio/mean": _ratio((mean * actions).sum(), actions.sum()),
        "sampling/importance_sampling_ratio/max": _value(largest.max()) if some else None,
        "sampling/outside_thresholds": _ratio((record.outside[seen] * actions).sum(), actions.sum()),
    }


def gap_of(batch: Batch, record: Record) -> tuple[Gap, Tensor]:
    """The gap of each completion, and for which it is known."""
    from rloo_pipeline.algorithm import mismatch

    completions = batch.completions
    old, sampling = completions.old_logps, completions.sampling_logps
    if old is not None and sampling is not None and old is not sampling:
        return mismatch.gap(old, sampling, completions.mask), completions.mask.any(-1)
    return mismatch.Gap(*record.gap.unbind(-1)), record.compared > 0


def _effective(log_weights: Tensor) -> float | None:
    from rloo_pipeline.algorithm.mismatch import effective_sample_size

    return _value(effective_sample_size(log_weights))


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return _value(part / whole) if float(whole) else None


def _value(number: Tensor) -> float | None:
    return float(number) if math.isfinite(float(number)) else None


def _known(column: pa.ChunkedArray) -> list[float]:
    return [value for value in column.to_pylist() if value is not None and math.isfinite(value)]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
