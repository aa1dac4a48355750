"""The metrics of a round in metrics.json, under TRL's names. A value that does not exist (no scorable row) is null.

Rewards and lengths cover all sampled completions, including those that the update does not use. Means over tokens
weigh every token equally, as in TRL.
"""

import json
import math
import statistics
from collections import Counter

import pyarrow as pa
from torch import Tensor

from rloo_pipeline.algorithm import mismatch, nan_stats
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.config import Algorithm, Mismatch
from rloo_pipeline.training import selection
from rloo_pipeline.training.batch import Batch
from rloo_pipeline.training.lengths import length_metrics
from rloo_pipeline.training.objective import Record

Metrics = dict[str, float | int | None]
OF_ENGINES = ("sampling_logp_difference/mean", "sampling_logp_difference/max", "kl", "outside_band")
"""Metrics `sampling/…` that compare the two engines; they have no value if the sampler masks tokens."""


def staleness(rollouts: pa.Table, round_: int) -> float | None:
    """Rounds by which the sampling policy is older than the policy that the update of round `round_` starts from.

    With `rollout.token_budget`, this is the mean over tokens; None without any tokens.
    """
    if tables.SEGMENTS not in rollouts.column_names:
        return round_ - 1 - int(tables.footer(rollouts)["policy_round"])
    ages = [
        (segment["end"] - start, round_ - 1 - segment["policy_round"])
        for segments in rollouts[tables.SEGMENTS].to_pylist()
        for start, segment in zip([0, *(one["end"] for one in segments)], segments, strict=False)
    ]
    return sum(tokens * age for tokens, age in ages) / sum(tokens for tokens, _ in ages) if ages else None


def sample_metrics(rollouts: pa.Table, scores: pa.Table, samples: int) -> Metrics:
    """Metrics of rewards, groups and lengths over all sampled completions; `samples` is K."""
    metrics: Metrics = {}
    for function in tables.functions_of(scores):
        values = _finite(scores[tables.score_column(function)])
        metrics[f"rewards/{function}/mean"], metrics[f"rewards/{function}/std"] = _mean(values), _std(values)
        metrics[f"rewards/{function}/none"] = len(scores) - len(values)
    groups = selection.scores(scores).view(-1, samples)
    scorable = _finite(scores["reward"])
    metrics["reward"], metrics["reward_std"] = _mean(scorable), _std(scorable)
    equal = sum(not nan_stats.differ(group) for group in groups)
    metrics["frac_reward_zero_std"] = equal / len(groups) if rewarded(scores) and len(groups) else None
    metrics["unscorable"] = len(scores) - len(scorable) if rewarded(scores) else 0
    metrics["scoring_errors"] = len(scores) - scores["error"].null_count
    return metrics | length_metrics(rollouts) | tool_metrics(rollouts)


def rewarded(scores: pa.Table) -> bool:
    """False if no reward function has a weight: the run then learns from a teacher alone."""
    weights = tables.weights_of(scores)
    return not weights or any(weights.values())


def tool_metrics(rollouts: pa.Table) -> Metrics:
    """Tool calls per completion, in total and by tool, and the share of calls answered by an error (0 without a call).

    The names are those of TRL's GRPOTrainer. Without tools there are no metrics.
    """
    if not tables.is_episodes(rollouts):
        return {}
    calls, failures = (sum(rollouts[name].to_pylist()) for name in ("tool_calls", "tool_failures"))
    names = json.loads(tables.footer(rollouts).get(tables.TOOLS, "[]"))
    rows = rollouts.select(["messages", "finish_reason"]).to_pylist()
    # calls at the end were made if their answers had no room, but not if a limit on turns ended the episode
    parts = (json.loads(row["messages"])[: None if row["finish_reason"] == "length" else -1] for row in rows)
    calls_made = (call for part in parts for message in part for call in message.get("tool_calls") or ())
    called = Counter(call["function"]["name"] for call in calls_made)
    return {
        "tools/call_frequency": calls / len(rollouts),
        "tools/failure_frequency": failures / calls if calls else 0.0,
        **{f"tools/{name}/call_frequency": called[name] / len(rollouts) for name in names},
    }


def group_metrics(teaching: Tensor, sampled: RoundTables, trained_groups: int) -> Metrics:
    """Numbers of groups sampled, sampled in refills, and teaching, and the tokens sampled per teaching group.

    Args:
        teaching: [prompts] bool, all groups of the round.
        sampled: all tables of the round.
        trained_groups: number of groups that the update trains on.
    """
    groups, taught = len(teaching), int(teaching.sum())
    tokens = sum(tables.sampled_lengths(sampled.rollouts))
    return {
        "groups/sampled": groups,
        "groups/refilled": groups * sampled.refilled // max(1, len(sampled.rollouts)),
        "groups/teaching": taught,
        "groups/tokens_per_teaching": tokens / min(taught, trained_groups) if taught else None,
    }


def update_metrics(batch: Batch, record: Record, algorithm: Algorithm, ratio_is_known: bool) -> Metrics:
    """Metrics of the optimizer steps: KL, entropy, ratios and clipping, and the gap between sampler and trainer."""
    lengths = batch.completions.mask.sum(-1)
    tokens = lengths * record.trained
    actions = tokens if algorithm.importance_sampling_level == "token" else record.trained
    clipped = {"low": record.low, "high": record.high, "region": record.low + record.high}
    is_known = algorithm.loss is None  # a user's own loss may clip, but does not say where
    metrics: Metrics = {
        "shaped_reward": _value(batch.rewards.nanmean()),
        "beta": batch.beta,
        "entropy": _ratio(record.entropy.sum(), tokens.sum()),
        "ratio/mean": _ratio((record.ratio * actions).sum(), actions.sum()) if ratio_is_known else None,
        **{
            f"clip_ratio/{part}_mean": _ratio((share * actions).sum(), actions.sum()) if is_known else None
            for part, share in clipped.items()
        },
        "trained_completions": int((record.trained > 0).sum()),
    }
    if batch.teacher_kl is not None:
        scored = ~batch.masked
        metrics["teacher/kl"] = _ratio(batch.teacher_kl[scored].sum(), lengths[scored].sum())
    elif algorithm.teacher is not None:
        metrics["teacher/kl"] = _ratio(record.distilled.sum(), tokens.sum())
    metrics |= kl_metrics(batch, record) | _gap_metrics(batch, record, lengths)
    return metrics | _weight_metrics(record, tokens, algorithm.mismatch)


def kl_metrics(batch: Batch, record: Record) -> Metrics:
    """KL per token (TRL's `kl`) and per completion in nats, from the reward or from the loss; None without a
    reference.
    """
    if batch.completions.reference_logps is None:
        return {"kl": None, "kl/sequence_mean": None}
    kl, counted = (record.kl, record.trained > 0) if batch.kl is None else (batch.kl, ~batch.masked)
    lengths = batch.completions.mask.sum(-1)
    per_token = _ratio(kl[counted].sum(), lengths[counted].sum())
    return {"kl": per_token, "kl/sequence_mean": _value(kl[counted].mean())}


def _gap_metrics(batch: Batch, record: Record, lengths: Tensor) -> Metrics:
    """Metrics of the gap between sampler and trainer.

    They cover all completions if there was a pass for π_old; otherwise those of the first optimizer step, which starts
    from π_old.
    """
    gap, counted = _gap_of(batch, record)
    log_weights = gap.log_weight[counted]
    tokens = lengths[counted].sum()
    any_counted = len(log_weights) > 0
    return {
        "sampling/sampling_logp_difference/mean": _ratio(gap.absolute[counted].sum(), tokens),
        "sampling/sampling_logp_difference/max": _value(gap.largest[counted].max()) if any_counted else None,
        "sampling/importance_sampling_ratio/min": _value(log_weights.min().exp()) if any_counted else None,
        "sampling/importance_sampling_ratio/mean": _value(log_weights.exp().mean()) if any_counted else None,
        "sampling/importance_sampling_ratio/max": _value(log_weights.max().exp()) if any_counted else None,
        "sampling/kl": _ratio(gap.kl[counted].sum(), tokens),
        "sampling/outside_band": _ratio(gap.outside[counted].sum(), tokens),
        "sampling/effective_sample_size": _value(mismatch.effective_sample_size(log_weights)) if any_counted else None,
        "sampling/token_effective_sample_size": _ratio(
            gap.weight[counted].sum().square(), tokens * gap.weight_square[counted].sum()
        ),
    }


def _weight_metrics(record: Record, tokens: Tensor, section: Mismatch) -> Metrics:
    """Mismatch weights applied to the losses, under TRL's names, and the share truncated or dropped.

    The weights are per token or per completion, depending on the correction.
    """
    if section.correction == "none":
        return {"sampling/outside_thresholds": None}
    trained = record.trained > 0
    smallest, mean, largest = record.weight[trained].unbind(-1)
    actions = (tokens if section.acts_on_tokens else record.trained)[trained]
    any_trained = len(smallest) > 0
    return {
        "sampling/importance_sampling_ratio/min": _value(smallest.min()) if any_trained else None,
        "sampling/importance_sampling_ratio/mean": _ratio((mean * actions).sum(), actions.sum()),
        "sampling/importance_sampling_ratio/max": _value(largest.max()) if any_trained else None,
        "sampling/outside_thresholds": _ratio((record.outside[trained] * actions).sum(), actions.sum()),
    }


def _gap_of(batch: Batch, record: Record) -> tuple[mismatch.Gap, Tensor]:
    """The gap of each completion, and [completions] bool: True where it is measured."""
    completions = batch.completions
    old, sampling = completions.old_logps, completions.sampling_logps
    if old is not None and sampling is not None and old is not sampling:
        return mismatch.gap(old, sampling, completions.mask), completions.mask.any(-1)
    return mismatch.Gap(*record.gap.unbind(-1)), record.has_gap > 0


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return _value(part / whole) if float(whole) else None


def _value(number: Tensor) -> float | None:
    return float(number) if math.isfinite(float(number)) else None


def _finite(column: pa.ChunkedArray) -> list[float]:
    return [value for value in column.to_pylist() if value is not None and math.isfinite(value)]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
