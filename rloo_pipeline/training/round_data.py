"""Converts the tables of a round to the tensors of an update, and builds the table that the update writes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rloo_pipeline.artifacts import image_store, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.config import Algorithm
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import selection
from rloo_pipeline.training.batch import Batch, RoundTensors
from rloo_pipeline.training.packing import RowImages, Sequences

if TYPE_CHECKING:
    from rloo_pipeline.training.objective import Record  # for types only: editing the loss must not redo log-probs

CACHE_SIZE = 16
"""Number of processed images to keep: completions of one prompt follow each other."""


def sequences_of(rollouts: pa.Table, prompts: Path | None, policy: Policy) -> Sequences:
    """The token ids of rollouts, with the loss masks of episodes and the images of prompts.

    The arguments and errors are the same as for `images_of`.
    """
    masks = rollouts["loss_mask"].to_pylist() if tables.is_episodes(rollouts) else None
    images = images_of(rollouts, prompts, policy)
    return Sequences(rollouts["prompt_ids"].to_pylist(), rollouts["completion_ids"].to_pylist(), masks, images)


def images_of(rollouts: pa.Table, prompts: Path | None, policy: Policy) -> RowImages | None:
    """The images of a table of rollouts; None if its prompts have none.

    The model's image processor gets each image alone, so its output depends on nothing else.

    Args:
        rollouts: the table.
        prompts: folder that the stage `prompts` wrote.
        policy: the policy, for its processor.

    Raises:
        UserError: the prompts have images, but `prompts` is None.
    """
    if image_store.IDS not in rollouts.column_names:
        return None
    if prompts is None:
        raise UserError("the prompts of these rollouts have images; name the folder of the prompts with --prompts")
    store = image_store.ImageStore(prompts)
    pixels = lru_cache(CACHE_SIZE)(lambda digest: policy.pixels(store.image(digest)))
    return RowImages(rollouts[image_store.IDS].to_pylist(), pixels, policy.image_tokens)


def experts_of(rollouts: pa.Table) -> list[np.ndarray]:
    """The experts that the sampler chose, in the form of `Sequences.experts`.

    Raises:
        UserError: a completion has no experts, or their number differs between tokens.
    """
    column = rollouts[tables.EXPERTS] if tables.EXPERTS in rollouts.column_names else pa.nulls(len(rollouts))
    if column.null_count:
        raise UserError(
            f"rollout.router_replay: {column.null_count} of {len(rollouts)} rollouts have no experts in the column "
            f"{tables.EXPERTS}; delete the round's rollouts and run again, or set it to false"
        )
    tokens = [
        len(prompt) + len(ids) - 1
        for prompt, ids in zip(rollouts["prompt_ids"].to_pylist(), rollouts["completion_ids"].to_pylist(), strict=True)
    ]
    chosen = [row.values.to_numpy() for row in column]
    (of_token, rest), *others = {divmod(len(row), count) for row, count in zip(chosen, tokens, strict=True)}
    if others or rest or not of_token:
        raise UserError(
            f"rollout.router_replay: tokens have different numbers of experts in the column {tables.EXPERTS} (prompt "
            "and completion without the last token); delete the round's rollouts and run again"
        )
    return [row.reshape(count, -1) for row, count in zip(chosen, tokens, strict=True)]


def candidates_of(teacher: pa.Table, top_k: int, vocabulary: int) -> list[np.ndarray]:
    """The teacher's likeliest tokens, in the form of `Sequences.candidates`; tokens that the student lacks become 0.

    Args:
        teacher: the round's table.
        top_k: `algorithm.teacher.top_k`.
        vocabulary: number of tokens of the student.

    Raises:
        UserError: the table does not have `top_k` values for each token.
    """
    ids, _ = _top_of(teacher, top_k)
    ends = np.cumsum(tables.lengths(teacher["teacher_logps"]))
    return np.split(np.where(ids < vocabulary, ids, 0), ends[:-1])


def _top_of(teacher: pa.Table, top_k: int) -> list[np.ndarray]:
    """Ids and log-probs of the teacher's likeliest tokens, [tokens, K]; errors as in `candidates_of`."""
    expected = [top_k * tokens for tokens in tables.lengths(teacher["teacher_logps"])]
    for name in (tables.TOP_IDS, tables.TOP_LOGPS):
        if name not in teacher.column_names or tables.lengths(teacher[name]) != expected:
            raise UserError(
                f"algorithm.teacher.top_k: the column {name} of the teacher's tables does not have {top_k} values for "
                "each token; delete the round's folder teacher and run again"
            )
    columns = (teacher[name].combine_chunks().flatten() for name in (tables.TOP_IDS, tables.TOP_LOGPS))
    return [column.to_numpy().reshape(-1, top_k) for column in columns]


def completions_of(
    algorithm: Algorithm, round_tables: RoundTables, cut_by: object = None, vocabulary: int | None = None
) -> RoundTensors:
    """Converts a round's tables to tensors; the sampler's log-probs become π_old's under `old_logps: sampler`.

    The tensors have only the tokens that the model sampled, without gaps: those of tools and users are left out.
    `vocabulary` is the student's number of tokens, which `algorithm.teacher.top_k` needs.
    """
    rollouts, reference, teacher = round_tables.rollouts, round_tables.reference, round_tables.teacher
    lengths = torch.tensor(tables.sampled_lengths(rollouts))
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)

    def padded(logps: pa.ChunkedArray) -> Tensor:
        """Pads the log-probs of the sampled tokens with 0 to [completions, longest] float32."""
        return torch.zeros(mask.shape).masked_scatter(mask, torch.tensor(logps.combine_chunks().flatten().to_numpy()))

    def padded_top(teacher: pa.Table, top_k: int) -> Tensor:
        """[completions, longest, K] float32, −inf for tokens that the student does not have, 0 at padding."""
        ids, logps = _top_of(teacher, top_k)
        top = np.zeros((*mask.shape, top_k), np.float32)
        top[mask.numpy()] = np.where(ids < (vocabulary or 0), logps, -np.inf)
        return torch.from_numpy(top)

    top_k = algorithm.teacher_top_k
    normalizes_each = algorithm.multi_objective_aggregation == "normalize_then_sum"
    sampling = None if cut_by else padded(rollouts["sampling_logps"])
    return RoundTensors(
        scores=selection.scores(round_tables.scores),
        mask=mask,
        truncated=selection.truncated(rollouts),
        old_logps=sampling if algorithm.old_logps == "sampler" else None,
        reference_logps=None if reference is None else padded(reference["reference_logps"]),
        teacher_logps=None if teacher is None else padded(teacher["teacher_logps"]),
        teacher_top_logps=None if teacher is None or not top_k else padded_top(teacher, top_k),
        sampling_logps=sampling,
        lengths=torch.tensor(tables.lengths(rollouts["completion_ids"])),
        functions=selection.scores_of_functions(round_tables.scores) if normalizes_each else None,
    )


def train_table(rollouts: pa.Table, batch: Batch, record: Record, ratio_known: bool) -> pa.Table:
    """Builds train.parquet: the values that the update used for each completion.

    Args:
        rollouts: the rollouts trained on.
        batch: their rewards, KL and advantages.
        record: statistics of the optimizer steps on these rollouts.
        ratio_known: True if ratios were measured against the sampling policy; otherwise the column is null.
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
