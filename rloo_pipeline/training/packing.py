"""Packing: sequences of different lengths in one row without padding.

The completions of one prompt follow it and share it: all layers except attention work on the flat row, which holds each
prompt once. `kernels/attention.py` keeps the sequences apart.

Tokens that the model did not sample (answers of tools, text of the chat template between turns) are context: they are
in the row, but have no log-prob. The outputs for a pack therefore cover only the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.utils import _pytree as pytree

from rloo_pipeline.artifacts.vision import ImageTokens
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.layout import Layout, lay_out
from rloo_pipeline.training.sequence_group import SequenceGroup


class Vision(NamedTuple):
    """The images of a batch, in the order of its sequences."""

    arguments: dict[str, Tensor]
    """Arguments of the model's forward, such as pixel_values; images follow each other in the first dimension."""
    tokens: ImageTokens
    """The tokens that stand for an image."""

    def inputs(self, input_ids: Int[Tensor, "sequences tokens"]) -> dict[str, Tensor]:
        """All arguments that a batch with these ids needs for its images."""
        return {**self.arguments, **self.tokens.marked(input_ids)}


class RowImages(NamedTuple):
    """The images of sequences, by row."""

    rows: Sequence[Sequence[Any]]
    """The images of each sequence, such as their digests."""
    pixels: Callable[[Any], Mapping[str, Tensor]]
    """Function that processes an image."""
    tokens: ImageTokens

    def pick(self, rows: Sequence[int]) -> Vision | None:
        """The images of these sequences; None if they have none."""
        images = [self.pixels(image) for row in rows for image in self.rows[row]]
        if not images:
            return None
        return Vision({name: torch.cat([image[name] for image in images]) for name in images[0]}, self.tokens)


class OwnTokens(NamedTuple):
    """The completion tokens that each rank of a `SequenceGroup` predicts."""

    places: Int[Tensor, " completion_tokens"]
    """Positions among all completion tokens, rank by rank."""
    counts: tuple[int, ...]
    """Number of tokens of each rank."""
    mine: Int[Tensor, " own_completion_tokens"]
    """Positions of this rank's tokens."""


class Pack(NamedTuple):
    """Sequences of prompt and completion, packed into one row, or the part of it that one rank holds (`part`)."""

    input_ids: Int[Tensor, "1 tokens"]
    position_ids: Int[Tensor, "1 tokens"]
    """Positions, from 0 in each sequence."""
    layout: Layout
    """Layout of the sequences for attention."""
    predicting: Int[Tensor, " completion_tokens"]
    """Index in the row whose logits predict the token."""
    targets: Int[Tensor, " completion_tokens"]
    """Ids of the completion tokens that the model sampled."""
    completion_lengths: Int[Tensor, " sequences"]
    """Number of these tokens in each sequence; always on the CPU."""
    vision: Vision | None = None
    """Images of the prompts, sequence by sequence."""
    experts: Int[Tensor, "tokens layers_and_choices"] | None = None
    """Experts that the sampler chose, layer by layer; always on the CPU. None if routers choose."""
    candidates: Int[Tensor, "completion_tokens K"] | None = None
    """Ids of other tokens, distinct at each position, whose log-probs the loss needs; None if it needs none."""
    own: OwnTokens | None = None
    """Tells which rank predicts which completion tokens of a split row; None for a whole row."""

    def to(self, device: torch.device) -> Pack:
        """The pack on another device."""
        moved: Pack = pytree.tree_map_only(Tensor, lambda tensor: devices.moved(tensor, device), self)
        moved = moved._replace(layout=self.layout.to(device))
        return moved._replace(completion_lengths=self.completion_lengths, experts=self.experts)

    def part(self, group: SequenceGroup) -> Pack:
        """This rank's part of the row: its tokens, and the completion tokens that they predict. The layout and the
        lengths of completions remain those of the whole row.

        Raises:
            UserError: there are fewer tokens than ranks.
        """
        bounds = torch.tensor(group.bounds(self.input_ids.shape[1]))
        start, stop = bounds[group.number : group.number + 2].tolist()
        owner = torch.bucketize(self.predicting, bounds[1:], right=True)
        mine = (owner == group.number).nonzero().squeeze(-1)
        counts = owner.bincount(minlength=group.size).tolist()
        return self._replace(
            input_ids=self.input_ids[:, start:stop],
            position_ids=self.position_ids[:, start:stop],
            layout=replace(self.layout, group=group),
            predicting=self.predicting[mine] - start,
            targets=self.targets[mine],
            experts=None if self.experts is None else self.experts[start:stop],
            candidates=None if self.candidates is None else self.candidates[mine],
            own=OwnTokens(owner.argsort(stable=True), tuple(counts), mine),
        )

    def whole(self, values: Shaped[Tensor, "own_completion_tokens ..."]) -> Shaped[Tensor, "completion_tokens ..."]:
        """The values of all completion tokens, gathered from all ranks."""
        if self.own is None or self.layout.group is None:
            return values
        return self.layout.group.gather(values, self.own.places, self.own.counts)

    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward.

        With a mask, transformers does not infer sequences from the positions. Its masks of windows are then those of
        one sequence, and `kernels/attention.py` keeps the sequences apart.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": torch.ones_like(self.input_ids),
            "layout": self.layout,
        }

    def unpack(
        self, values: Shaped[Tensor, "completion_tokens ..."]
    ) -> tuple[Shaped[Tensor, "sequences longest ..."], Bool[Tensor, "sequences longest"]]:
        """Pads values of the completion tokens with 0; returns them and a mask that is False at padding."""
        lengths, longest = self.completion_lengths, int(self.completion_lengths.max())
        mask = torch.arange(longest) < lengths.unsqueeze(-1)
        # indices, not the mask: a GPU must count a mask first, and the gradient would wait for that
        places = devices.moved(mask.flatten().nonzero().squeeze(-1), values.device)
        padded = values.new_zeros(mask.numel(), *values.shape[1:]).index_copy(0, places, values)
        return padded.view(*mask.shape, *values.shape[1:]), devices.moved(mask, values.device)


class Sequences(NamedTuple):
    """Prompts and completions as token ids, one entry per sequence; none is empty."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]
    loss_masks: Sequence[Sequence[bool]] | None = None
    """True for completion tokens that the model sampled, at least one per sequence; None if it sampled all."""
    images: RowImages | None = None
    """Images of the prompts; None if there are none."""
    experts: Sequence[np.ndarray] | None = None
    """Experts that the sampler chose, [prompt and completion without its last token, layers × choices] per sequence;
    None if routers choose.
    """
    candidates: Sequence[np.ndarray] | None = None
    """`Pack.candidates`, [sampled tokens, K] per sequence."""

    def pick(self, rows: Sequence[int], group: SequenceGroup | None = None) -> Pack:
        """Packs these sequences. Neighbours with the same prompt share it, unless prompts have images, which may differ
        even if the ids do not. With a `group` of several ranks, returns this rank's part.
        """
        if group is not None and group.size > 1:
            return self.pick(rows).part(group)
        masks = None if self.loss_masks is None else [self.loss_masks[row] for row in rows]
        sequences = ([self.prompts[row] for row in rows], [self.completions[row] for row in rows], masks)
        if self.images is None:
            experts = None if self.experts is None else _experts(sequences[0], [self.experts[row] for row in rows])
            ids = None if self.candidates is None else np.concatenate([self.candidates[row] for row in rows])
            candidates = None if ids is None else torch.from_numpy(ids.astype(np.int64))
            return pack(*sequences)._replace(experts=experts, candidates=candidates)
        return pack(*sequences, share=False)._replace(vision=self.images.pick(rows))

    def sampled(self) -> list[int]:
        """Number of tokens of each completion that the model sampled."""
        return [len(ids) for ids in self.completions] if self.loss_masks is None else list(map(sum, self.loss_masks))


def pack(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[bool]] | None = None,
    share: bool = True,
) -> Pack:
    """Packs sequences with non-empty prompts and completions; `loss_masks` as in `Sequences`. With `share`, neighbours
    with the same prompt store it once.

    The first token of a completion is predicted from the prompt. Its last token is predicted but predicts nothing, so
    the row does not contain it.
    """
    shared = torch.tensor([False, *(share and previous == prompt for previous, prompt in pairwise(prompts))])
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(ids) for ids in completions])
    # what a sequence adds to the row: its prompt unless shared, and its completion without the last token
    prompt_added, completion_added = prompt_lengths.where(~shared, 0), lengths - 1
    completion_start = (prompt_added + completion_added).cumsum(0) - completion_added
    prompt_start = (completion_start - prompt_added).where(~shared, 0).cummax(0).values
    parts = (
        (ids[:-1],) if is_shared else (prompt, ids[:-1])
        for is_shared, prompt, ids in zip(shared.tolist(), prompts, completions, strict=True)
    )
    row = _concatenate(chain.from_iterable(parts))
    shift = (completion_start - prompt_lengths).repeat_interleave(prompt_added + completion_added)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    step = torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
    after_prompt = (prompt_start + prompt_lengths)[sequence]
    packed = Pack(
        input_ids=row.unsqueeze(0),
        position_ids=(torch.arange(len(row)) - shift).unsqueeze(0),
        layout=lay_out(prompt_start, prompt_lengths, completion_start, completion_added),
        predicting=torch.where(step == 0, after_prompt, completion_start[sequence] + step) - 1,
        targets=_concatenate(completions),
        completion_lengths=lengths,
    )
    return packed if loss_masks is None else _of_sampled(packed, loss_masks)


def _of_sampled(pack: Pack, loss_masks: Sequence[Sequence[bool]]) -> Pack:
    """Returns the row with predictions of the sampled tokens only."""
    sampled = torch.from_numpy(np.fromiter(chain.from_iterable(loss_masks), np.bool_))
    lengths = torch.tensor([sum(mask) for mask in loss_masks])
    return pack._replace(predicting=pack.predicting[sampled], targets=pack.targets[sampled], completion_lengths=lengths)


def _experts(prompts: Sequence[Sequence[int]], experts: Sequence[np.ndarray]) -> Tensor:
    """Joins the experts of several sequences into those of a row. A shared prompt has the experts of the first sequence
    that shares it.
    """
    starts = [0, *(len(prompt) if previous == prompt else 0 for previous, prompt in pairwise(prompts))]
    return torch.from_numpy(
        np.concatenate([of[start:] for start, of in zip(starts, experts, strict=True)]).astype(np.int32)
    )


def _concatenate(parts: Iterable[Sequence[int]]) -> Tensor:
    """Token ids as one tensor, through a numpy array because building a tensor from a list is slow."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64))
