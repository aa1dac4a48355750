"""Moves tokens from a pack's row to a padded layout for attention, and back.

The row of a pack holds each prompt once, followed by its completions. For attention every sequence is laid out in
full, prompt and completion, in a block of sequences of similar length. FlashAttention takes the heads of a token side
by side, as in the row. The other kernels take all tokens of one head side by side (`HeadIndex`), so that each head of
a sequence is a matrix, and the query heads that share a key-value head are one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Int32, Int64, Shaped
from torch import Tensor
from torch.nn.functional import embedding_bag
from torch.utils import _pytree as pytree

from rloo_pipeline.runtime import devices
from rloo_pipeline.training.sequence_group import SequenceGroup

MIN_FILL = 7 / 8
"""Minimum length of a block's shortest sequence, as a share of the longest: padding adds at most a factor of 1 /
MIN_FILL² of work.
"""


class Block(NamedTuple):
    """Sequences of similar length."""

    sequences: int
    tokens: int
    """Length to which each is padded."""


class HeadIndex(NamedTuple):
    """The layout of single heads.

    The row is ordered by (token, head), the padded layout by (sequence, head, token). A token of a shared prompt has
    one entry in the row and one copy per sequence in the layout.
    """

    sources: Int32[Tensor, " laid_out_heads"]
    """Index in the row."""
    first_copy: Int32[Tensor, " row_heads"]
    """Index in the layout of an entry's first copy."""
    other_copies: Int64[Tensor, " others"]
    """Indices in the layout that are not in `first_copy`: padding, and further copies."""
    copies: Int32[Tensor, " copies"]
    """Indices in the layout of all copies, grouped by entry of the row."""
    starts: Int32[Tensor, " row_heads"]
    """Start of each entry's copies in `copies`."""


class Gather(torch.autograd.Function):
    """[tokens · heads, head_dim] → [laid out · heads, head_dim]; gradients of all copies of an entry add up."""

    @staticmethod
    def forward(
        ctx: Any, heads: Shaped[Tensor, "row_heads head_dim"], index: HeadIndex
    ) -> Shaped[Tensor, "laid_out_heads head_dim"]:
        """Copies every entry of the row to all its positions in the layout."""
        ctx.index = index
        return heads.index_select(0, index.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the row."""
        return embedding_bag(ctx.index.copies, gradients[0], ctx.index.starts, mode="sum"), None


class Scatter(torch.autograd.Function):
    """[laid out · heads, head_dim] → [tokens · heads, head_dim]; only first copies have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, laid_out: Shaped[Tensor, "laid_out_heads head_dim"], index: HeadIndex
    ) -> Shaped[Tensor, "row_heads head_dim"]:
        """Takes every entry of the row from its first copy in the layout."""
        ctx.index = index
        return laid_out.index_select(0, index.first_copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the layout."""
        index = ctx.index
        return gradients[0].index_select(0, index.sources).index_fill_(0, index.other_copies, 0), None


@dataclass(frozen=True, eq=False)
class Layout:
    """The padded layout of a pack's sequences, block by block."""

    sources: Int64[Tensor, " laid_out"]
    """Index of the token in the row; 0 at padding."""
    real: Bool[Tensor, " laid_out"]
    """False at padding."""
    first_copy: Int64[Tensor, " tokens"]
    """Index in the layout of each token of the row; for a shared token, of its first copy."""
    starts: Int32[Tensor, " boundaries"]
    """Start of each sequence in the layout, and the end."""
    begins: Int64[Tensor, " laid_out"]
    """Start of the token's sequence in the layout."""
    lengths: Int64[Tensor, " laid_out"]
    """Tokens of the token's sequence in the layout, with padding."""
    tokens: HeadIndex
    """Index for one head per token, as FlashAttention takes it."""
    blocks: tuple[Block, ...]
    """Blocks, the longest first."""
    even: bool
    """True if all sequences have the same length."""
    group: SequenceGroup | None = None
    """Ranks over which the tokens of the row are split; None if a rank has all of them."""
    _by_heads: dict[int, HeadIndex] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> Layout:
        """The layout on another device."""
        parts = vars(self) | {"_by_heads": {}}
        return Layout(**pytree.tree_map_only(Tensor, lambda tensor: devices.moved(tensor, device), parts))

    def head_index(self, heads: int) -> HeadIndex:
        """The layout for `heads` heads per token, derived from that for one without asking a GPU for any size."""
        if heads == 1:
            return self.tokens
        if heads not in self._by_heads:
            self._by_heads[heads] = self._head_index(heads)
        return self._by_heads[heads]

    def _head_index(self, heads: int) -> HeadIndex:
        one, head = self.tokens, torch.arange(heads, device=self.sources.device)
        # within a sequence: all tokens of the first head, then all tokens of the next
        first = torch.arange(len(self.sources), device=head.device) + (heads - 1) * self.begins
        laid_out = first.unsqueeze(-1) + self.lengths.unsqueeze(-1) * head
        sources = (self.sources.unsqueeze(-1) * heads + head).flatten()
        sources = torch.empty_like(sources).scatter_(0, laid_out.flatten(), sources)
        # an entry of the row has as many copies as its token, one head after the other
        counts = torch.diff(one.starts, append=one.starts.new_full((1,), len(one.copies)))
        starts = one.starts.unsqueeze(-1).long() * heads + counts.unsqueeze(-1) * head
        owner = self.sources.index_select(0, one.copies)
        place = torch.arange(len(owner), device=head.device) - one.starts.index_select(0, owner)
        places = starts.index_select(0, owner) + place.unsqueeze(-1)
        copies = laid_out.index_select(0, one.copies).flatten()
        copies = torch.empty_like(copies).scatter_(0, places.flatten(), copies)
        first_copy, others = (laid_out.index_select(0, of).flatten() for of in (self.first_copy, one.other_copies))
        return HeadIndex(sources.int(), first_copy.int(), others, copies.int(), starts.flatten().int())


def lay_out(
    prompts: Int[Tensor, " sequences"],
    prompt_lengths: Int[Tensor, " sequences"],
    completions: Int[Tensor, " sequences"],
    completion_lengths: Int[Tensor, " sequences"],
) -> Layout:
    """Lays out sequences that consist of a prompt and a completion.

    Args:
        prompts: index in the row where the prompt begins; neighbours with the same index share a prompt.
        prompt_lengths: lengths in tokens.
        completions: index in the row where the completion begins.
        completion_lengths: lengths in tokens of the part of each completion that is in the row.
    """
    lengths = prompt_lengths + completion_lengths
    order = lengths.argsort(descending=True, stable=True)
    blocks = _blocks(lengths[order].tolist())
    padded = torch.cat([torch.full((block.sequences,), block.tokens) for block in blocks])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), padded.cumsum(0)])
    sequence = order.repeat_interleave(padded)
    position = torch.arange(len(sequence)) - starts[:-1].repeat_interleave(padded)
    in_completion = position - prompt_lengths[sequence]
    sources = torch.where(in_completion < 0, prompts[sequence] + position, completions[sequence] + in_completion)
    real = in_completion < completion_lengths[sequence]
    # the outputs of a shared prompt are read from the sequence that is laid out first
    laid_out = torch.arange(len(sources))
    first_copy = torch.full((int(sources[real].max()) + 1,), len(sources))
    first_copy.scatter_reduce_(0, sources[real], laid_out[real], "amin")
    sources, copies = sources.where(real, 0), real.nonzero().squeeze(-1)
    counts = sources[copies].bincount(minlength=len(first_copy))
    one = HeadIndex(
        sources.int(),
        first_copy.int(),
        other_copies=torch.ones_like(real).index_fill_(0, first_copy, 0).nonzero().squeeze(-1),
        copies=copies[sources[copies].argsort(stable=True)].int(),
        starts=(counts.cumsum(0) - counts).int(),
    )
    begins, even = starts[:-1].repeat_interleave(padded), bool((lengths == lengths[0]).all())
    tensors = sources, real, first_copy, starts.int(), begins, padded.repeat_interleave(padded)
    return Layout(*tensors, one, blocks, even)


def _blocks(lengths: Sequence[int]) -> tuple[Block, ...]:
    """Groups lengths, sorted from the longest, into blocks."""
    blocks = [Block(0, lengths[0])]
    for length in lengths:
        count, longest = blocks[-1]
        if length < MIN_FILL * longest:
            blocks.append(Block(1, length))
        else:
            blocks[-1] = Block(count + 1, longest)
    return tuple(blocks)
