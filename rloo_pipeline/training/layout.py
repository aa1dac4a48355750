"""Where attention finds the tokens of each sequence of a pack.

The row of a pack holds a prompt once, its samples behind it. For attention each sequence is laid out whole, prompt and
completion, in a block of others of about its length. For one kernel the heads of a token lie side by side, as in the
row; for others the tokens of a head (`Rows`), so that the heads of a sequence are matrices, and the queries of heads
that share a key are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

LIKE = 7 / 8
"""Sequences of at least this share of the longest stand beside it: at most 1 / LIKE² of the work is for filling."""


class Block(NamedTuple):
    """Sequences of about the same length."""

    sequences: int
    tokens: int
    """To which each is filled up."""


class Rows(NamedTuple):
    """Where single heads are, in the row head by head of each token, laid out token by token of each head of each
    sequence; int32.
    """

    places: Tensor
    """[laid out · heads], the place in the row of each"""
    back: Tensor
    """[tokens · heads], the place among those laid out of each; of a shared one its first"""
    untaken: Tensor
    """The places among those laid out that are nobody's first; int64."""
    all_of: Tensor
    """Places among those laid out, of each head of the row all, one head after the other"""
    starts: Tensor
    """[tokens · heads], where those of each begin in `all_of`"""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of sequences are, laid out for attention block by block."""

    places: Tensor
    """[laid out], the place in the row of each token; 0 where a sequence is filled up"""
    real: Tensor
    """[laid out] bool, False where a sequence is filled up"""
    back: Tensor
    """[tokens], the place among those laid out of each token of the row; of a shared one its first"""
    starts: Tensor
    """[sequences + 1] int32, where each sequence begins among those laid out, and the end"""
    blocks: tuple[Block, ...]
    """The longest first."""
    known: dict[int, Rows] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> Layout:
        """The layout on another device."""
        tensors = self.places, self.real, self.back, self.starts
        places, real, back, starts = (tensor.to(device, non_blocking=True) for tensor in tensors)
        return Layout(places, real, back, starts, self.blocks)

    def of_heads(self, count: int) -> Rows:
        """The layout of so many heads a token, which is made once."""
        if count not in self.known:
            self.known[count] = self._of_heads(count)
        return self.known[count]

    def _of_heads(self, count: int) -> Rows:
        device = self.places.device
        tokens = torch.tensor([block.tokens for block in self.blocks], device=device)
        length = tokens.repeat_interleave(torch.tensor([block.sequences for block in self.blocks], device=device))
        begin, head = self.starts[:-1].long(), torch.arange(count, device=device)
        # a head's tokens follow each other, and its sequence's heads
        first = torch.arange(len(self.places), device=device) + ((count - 1) * begin).repeat_interleave(length)
        laid_out = first.unsqueeze(-1) + length.repeat_interleave(length).unsqueeze(-1) * head
        in_row = self.places.unsqueeze(-1) * count + head
        places, real = torch.empty_like(in_row).flatten(), self.real.new_empty(in_row.numel())
        places[laid_out], real[laid_out] = in_row, self.real.unsqueeze(-1)
        back = laid_out[self.back].flatten()
        those = real.nonzero().squeeze(-1)
        all_of = those[places[those].argsort(stable=True)]
        sizes = places[those].bincount(minlength=len(back))
        untaken = torch.ones_like(real).index_fill_(0, back, 0).nonzero().squeeze(-1)
        return Rows(places.int(), back.int(), untaken, all_of.int(), (sizes.cumsum(0) - sizes).int())


def lay_out(prompts: Tensor, prompt_lengths: Tensor, completions: Tensor, completion_lengths: Tensor) -> Layout:
    """A layout of sequences, each a prompt and a completion that begin at these places of a row.

    Args: four of [sequences]; neighbours share a prompt where it begins at the same place.
    """
    lengths = prompt_lengths + completion_lengths
    order = lengths.argsort(descending=True, stable=True)
    blocks = _blocks(lengths[order].tolist())
    filled = torch.cat([torch.full((block.sequences,), block.tokens) for block in blocks])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), filled.cumsum(0)])
    of_sequence = order.repeat_interleave(filled)
    step = torch.arange(len(of_sequence)) - starts[:-1].repeat_interleave(filled)
    behind = step - prompt_lengths[of_sequence]
    places = torch.where(behind < 0, prompts[of_sequence] + step, completions[of_sequence] + behind)
    real = behind < completion_lengths[of_sequence]
    # of the sequences that share a prompt, the one that is laid out first gives back its outputs
    laid_out = torch.arange(len(places))
    back = torch.full((int(places[real].max()) + 1,), len(places))
    back.scatter_reduce_(0, places[real], laid_out[real], "amin")
    return Layout(places.where(real, 0), real, back, starts.int(), blocks)


def _blocks(lengths: Sequence[int]) -> tuple[Block, ...]:
    """Neighbours of about the same length, the longest first."""
    blocks = [Block(0, lengths[0])]
    for length in lengths:
        count, longest = blocks[-1]
        if length < LIKE * longest:
            blocks.append(Block(1, length))
        else:
            blocks[-1] = Block(count + 1, longest)
    return tuple(blocks)
