"""The tables of a round, the tensors that an update makes of them, and the table that it writes."""

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


class RoundFiles(NamedTuple):
    """Parquet files of one round, shards in order."""

    rollouts: Sequence[Path]
    scores: Sequence[Path]
    reference: Sequence[Path]


class RoundTables(NamedTuple):
    """The tables of a round; row i of each is about the same completion."""

    rollouts: pa.Table
    scores: pa.Table
    reference: pa.Table | None = None

    def take(self, rows: list[int]) -> RoundTables:
        """The given rows of every table."""
        if rows == list(range(len(self.rollouts))):
            return self
        reference = None if self.reference is None else self.reference.take(rows)
        return RoundTables(self.rollouts.take(rows), self.scores.take(rows), reference)


def read(config: Config, inputs: RoundFiles) -> RoundTables:
    """Reads the tables of a round and checks that they are about the same completions.

    Raises:
        UserError: a file is missing or damaged, or is about other completions.
    """
    rollouts, scores = tables.read_all(inputs.rollouts, "rollouts"), tables.read_all(inputs.scores, "scores")
    tables.check_aligned(rollouts, scores, str(inputs.scores[0].parent))
    if not config.uses_reference:
        return RoundTables(rollouts, scores)
    reference = tables.read_all(inputs.reference, "reference")
    tables.check_aligned(rollouts, reference, str(inputs.reference[0].parent))
    return RoundTables(rollouts, scores, reference)


def chosen_rows(config: Config, sampled: RoundTables) -> list[int]:
    """Rows that the update trains on: all of them, or the first teaching groups of an over-sampled round."""
    from rloo_pipeline.algorithm.nan_stats import first_teaching
    from rloo_pipeline.training.batch import select

    samples = config.rollout.num_generations
    if len(sampled.rollouts) == config.rollout.generation_batch_size:
        return list(range(len(sampled.rollouts)))
    selection = select(config.algorithm, samples, _scores(sampled.scores), _truncated(sampled.rollouts))
    groups = first_teaching(selection.teaching, config.rollout.num_prompts)
    return [group * samples + sample for group in groups for sample in range(samples)]


def completions_of(config: Config, round_tables: RoundTables) -> Completions:
    """Converts a round's tables to tensors; the sampler's log-probs become π_old's under `old_logps: sampler`."""
    import torch

    from rloo_pipeline.training.batch import Completions

    lengths = torch.tensor(tables.lengths(round_tables.rollouts["completion_ids"]))
    sampling = None if config.rollout.cut_by else _padded(round_tables.rollouts["sampling_logps"])
    return Completions(
        scores=_scores(round_tables.scores),
        mask=torch.arange(int(lengths.max())) < lengths.unsqueeze(-1),
        truncated=_truncated(round_tables.rollouts),
        old_logps=sampling if config.algorithm.old_logps == "sampler" else None,
        reference_logps=None if round_tables.reference is None else _padded(round_tables.reference["reference_logps"]),
        sampling_logps=sampling,
    )


def _truncated(rollouts: pa.Table) -> Tensor:
    """[completions] bool: true where the completion has no end token."""
    import torch

    return torch.tensor([reason != "stop" for reason in rollouts["finish_reason"].to_pylist()])


def _scores(scores: pa.Table) -> Tensor:
    """Weighted rewards, [completions] float64, NaN where unscorable."""
    import torch

    return torch.tensor([torch.nan if r is None else r for r in scores["reward"].to_pylist()], dtype=torch.float64)


def _padded(column: pa.ChunkedArray) -> Tensor:
    """Pads lists of different lengths with 0 to [rows, longest] float32."""
    import torch

    lengths = torch.tensor(tables.lengths(column))
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    return torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(column.combine_chunks().flatten().to_numpy()))


def train_table(rollouts: pa.Table, batch: Batch, record: Record, ratio_known: bool) -> pa.Table:
    """Builds train.parquet: what the update used of each completion.

    Args:
        rollouts: the rollouts trained on.
        batch: their rewards, KL and advantages.
        record: statistics of the optimizer steps about them.
        ratio_known: whether the ratios were measured against the sampling policy; if not, the column is null.
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
        "prompt_id": rollouts["prompt_id"],
        "sample": rollouts["sample"],
        "reward": rewards,
        "kl": kl.float().tolist() if kl is not None else pa.nulls(len(rewards), pa.float32()),
        "advantage": advantages.tolist(),
        "ratio": [ratio if trained else None for ratio, trained in zip(ratios, record.trained.tolist(), strict=True)],
        "clipped": ((record.low + record.high) > 0).tolist(),
        "masked": batch.masked.tolist(),
    }
    return pa.table(columns, schema=tables.TRAIN)
