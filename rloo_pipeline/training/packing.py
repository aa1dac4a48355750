"""Packing: sequences of different lengths in one row without padding.

Samples of one prompt stand behind it and share it: every layer but attention works on the flat row, where a prompt is
once. `attention` keeps the sequences apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rloo_pipeline.training.layout import Layout, lay_out


class Pack(NamedTuple):
    """Some sequences of prompt and completion in one row."""

    input_ids: Tensor
    """[1, tokens]"""
    position_ids: Tensor
    """[1, tokens], from 0 in each sequence"""
    layout: Layout
    """of the sequences, for attention"""
    predicting: Tensor
    """[completion tokens], the places in the row whose logits predict a completion token"""
    targets: Tensor
    """[completion tokens], those tokens"""
    completion_lengths: Tensor
    """[sequences]"""

    def to(self, device: torch.device) -> Pack:
        """The pack on another device."""
        ids, positions, layout, *others = self
        moved = (tensor.to(device, non_blocking=True) for tensor in others)
        return Pack(
            ids.to(device, non_blocking=True), positions.to(device, non_blocking=True), layout.to(device), *moved
        )

    def inputs(self) -> dict[str, Any]:
        """What the model's layers are called with."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "layout": self.layout}

    def unpack(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the completion tokens, [completion tokens], as [sequences, longest] and the bool mask of real
        places.
        """
        longest = int(self.completion_lengths.max())
        mask = torch.arange(longest, device=values.device) < self.completion_lengths.unsqueeze(-1)
        return values.new_zeros(mask.shape).masked_scatter(mask, values), mask


class Sequences(NamedTuple):
    """Prompts and completions as token ids, one entry a sequence; none is empty."""

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[int]]

    def pick(self, rows: Sequence[int]) -> Pack:
        """Some of them, packed; neighbours of one prompt share it."""
        return pack([self.prompts[row] for row in rows], [self.completions[row] for row in rows])

    def micro_batches(self, rows: Sequence[int], max_tokens: int, shares: int = 1) -> list[list[int]]:
        """Rows cut into micro-batches of at most `max_tokens` tokens, and into at least as many as there are shares.

        Those of one prompt stay together, and the longest come first, so that each micro-batch holds its likes. A
        sequence over the limit has a micro-batch of its own.
        """
        of_prompt: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            of_prompt.setdefault(tuple(self.prompts[row]), []).append(row)
        for group in of_prompt.values():
            group.sort(key=lambda row: (-len(self.completions[row]), row))
        tokens = sum(map(len, of_prompt)) + sum(len(self.completions[row]) for row in rows)
        limit = min(max_tokens, -(-tokens // shares))
        batches: list[list[int]] = []
        room = 0
        order = sorted(
            of_prompt, key=lambda ids: (-len(ids) - len(self.completions[of_prompt[ids][0]]), of_prompt[ids])
        )
        for prompt in order:
            shared = False
            for row in of_prompt[prompt]:
                needed = len(self.completions[row]) + (0 if shared else len(prompt))
                if not batches or needed > room:
                    batches.append([])
                    room = limit
                    needed = len(prompt) + len(self.completions[row])
                batches[-1].append(row)
                room -= needed
                shared = True
        return batches


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Pack:
    """Packs sequences; prompts and completions must not be empty (the first completion token is predicted from the
    prompt). The last token of a completion is predicted, and predicts nothing: it is not in the row.
    """
    shares = torch.tensor([False, *(before == prompt for before, prompt in pairwise(prompts))])
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(ids) for ids in completions])
    # in the row: each completion but its last token, before it its prompt where that is not the one before
    new, seen = prompt_lengths.where(~shares, 0), lengths - 1
    own = (new + seen).cumsum(0) - seen
    first = (own - new).where(~shares, 0).cummax(0).values
    parts = (
        (ids[:-1],) if shared else (prompt, ids[:-1])
        for shared, prompt, ids in zip(shares.tolist(), prompts, completions, strict=True)
    )
    row = _flat(chain.from_iterable(parts))
    positions = torch.arange(len(row)) - (own - prompt_lengths).repeat_interleave(new + seen)
    of_token = torch.arange(len(lengths)).repeat_interleave(lengths)
    step = torch.arange(len(of_token)) - (lengths.cumsum(0) - lengths)[of_token]
    return Pack(
        input_ids=row.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        layout=lay_out(first, prompt_lengths, own, seen),
        predicting=torch.where(step == 0, (first + prompt_lengths)[of_token], own[of_token] + step) - 1,
        targets=_flat(completions),
        completion_lengths=lengths,
    )


def _flat(parts: Iterable[Sequence[int]]) -> Tensor:
    """All in one, by way of an array, since a tensor takes in a list slowly."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64))
