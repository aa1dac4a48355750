"""A round's tables, and the tensors that are made of them for an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_pipeline.training.batch import Batch, Completions
    from rloo_pipeline.training.objective import Record


class Inputs(NamedTuple):
    """Files of one round, shards in order."""

    rollouts: Sequence[Path]
    scores: Sequence[Path]
    reference: Sequence[Path]


class Tables(NamedTuple):
    """A round's tables, row by row of the same completions."""

    rolled: pa.Table
    scored: pa.Table
    reference: pa.Table | None = None

    def take(self, rows: list[int]) -> Tables:
        """Some of the rows."""
        if rows == list(range(len(self.rolled))):
            return self
        reference = None if self.reference is None else self.reference.take(rows)
        return Tables(self.rolled.take(rows), self.scored.take(rows), reference)


def read(config: Config, inputs: Inputs) -> Tables:
    """The tables of a round, once it is sure that they belong together.

    Raises:
        UserError: one is missing or damaged, or is not of these completions.
    """
    rolled, scored = tables.read_all(inputs.rollouts, "rollouts"), tables.read_all(inputs.scores, "scores")
    tables.check_aligned(rolled, scored, str(inputs.scores[0].parent))
    if not config.uses_reference:
        return Tables(rolled, scored)
    reference = tables.read_all(inputs.reference, "reference")
    tables.check_aligned(rolled, reference, str(inputs.reference[0].parent))
    return Tables(rolled, scored, reference)


def chosen_rows(config: Config, sampled: Tables) -> list[int]:
    """The rows that the update trains on: all, or of an over-sampled round the first groups that teach."""
    from rloo_pipeline.algorithm.nan_stats import first_of
    from rloo_pipeline.training.batch import use_of

    samples = config.rollout.num_generations
    if len(sampled.rolled) == config.rollout.generation_batch_size:
        return list(range(len(sampled.rolled)))
    use = use_of(config.algorithm, samples, _scores(sampled.scored), _truncated(sampled.rolled))
    groups = first_of(use.teaching, config.rollout.num_prompts)
    return [group * samples + sample for group in groups for sample in range(samples)]


def completions_of(config: Config, found: Tables) -> Completions:
    """The tables as tensors, with the sampler's log-probs as the old ones where the configuration says so."""
    import torch

    from rloo_pipeline.training.batch import Completions

    lengths = torch.tensor(tables.lengths(found.rolled["completion_ids"]))
    sampling = None if config.rollout.cut_by else _padded(found.rolled["sampling_logps"])
    return Completions(
        scores=_scores(found.scored),
        mask=torch.arange(int(lengths.max())) < lengths.unsqueeze(-1),
        truncated=_truncated(found.rolled),
        old_logps=sampling if config.algorithm.old_logps == "sampler" else None,
        reference_logps=None if found.reference is None else _padded(found.reference["reference_logps"]),
        sampling_logps=sampling,
    )


def _truncated(rolled: pa.Table) -> Tensor:
    """[completions] bool, true without an end token."""
    import torch

    return torch.tensor([reason != "stop" for reason in rolled["finish_reason"].to_pylist()])


def _scores(scored: pa.Table) -> Tensor:
    """Weighted rewards, [completions] float64, NaN where unscorable."""
    import torch

    return torch.tensor([torch.nan if r is None else r for r in scored["reward"].to_pylist()], dtype=torch.float64)


def _padded(column: pa.ChunkedArray) -> Tensor:
    """Lists of different lengths as [rows, longest] float32, 0 behind the end."""
    import torch

    lengths = torch.tensor(tables.lengths(column))
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    return torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(column.combine_chunks().flatten().to_numpy()))


def train_table(rolled: pa.Table, batch: Batch, record: Record, ratio_known: bool) -> pa.Table:
    """What an update used of each completion, for train.parquet.

    Args:
        rolled: the rollouts that were trained on.
        batch: their rewards, KL and advantages.
        record: what the steps saw of them.
        ratio_known: whether a step had the log-probs of the policy that sampled; else ratios of 1 are no measurement.
    """
    rewards = [None if value != value else value for value in batch.rewards.tolist()]
    mask = batch.completions.mask
    ratios = [None] * len(rewards) if not ratio_known else record.ratio.tolist()
    advantages = batch.advantages
    if advantages.dim() == 2:
        advantages = (advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    in_loss = batch.kl is None and batch.completions.reference_logps is not None
    kl = record.kl if in_loss else batch.kl
    columns = {
        "prompt_id": rolled["prompt_id"],
        "sample": rolled["sample"],
        "reward": rewards,
        "kl": kl.float().tolist() if kl is not None else pa.nulls(len(rewards), pa.float32()),
        "advantage": advantages.tolist(),
        "ratio": [ratio if seen else None for ratio, seen in zip(ratios, record.seen.tolist(), strict=True)],
        "clipped": ((record.low + record.high) > 0).tolist(),
        "masked": batch.masked.tolist(),
    }
    return pa.table(columns, schema=tables.TRAIN)
