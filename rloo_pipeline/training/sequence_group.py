"""Sequence parallelism: the ranks of a group compute each micro-batch together, each rank a part of its tokens.

All layers except attention work on a rank's own tokens. Attention needs whole sequences but not all heads, so queries,
keys and values are exchanged before it: a rank sends each head of its tokens to the rank that computes this head, and
gets its own heads of all tokens. The outputs go back the same way (DeepSpeed-Ulysses, Jacobs et al. 2023; DeepSpeed's
class fixes lengths and heads). A rank computes the part of the weights' gradient that goes through its tokens, so the
gradients of a group add up to the gradient of its micro-batch.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import ranks
from rloo_pipeline.training import model_support


class SequenceGroup(NamedTuple):
    """The ranks that share the tokens of a micro-batch, and the index of this rank among them."""

    number: int
    """Index of this rank, and of its part in the row."""
    size: int
    """Number of ranks, S; 1 splits nothing."""
    stream: int
    """Index of this group among all groups; each group has different micro-batches."""
    streams: int
    """Number of groups."""
    members: Any = None
    """torch's process group of these ranks; None if this rank is alone."""
    peers: Any = None
    """torch's process group of the ranks with the same index in their groups."""

    def bounds(self, tokens: int) -> list[int]:
        """Start of each part of a row, and the end of the last.

        Raises:
            UserError: there are fewer tokens than parts.
        """
        if tokens < self.size:
            raise UserError(
                f"deepspeed.sequence_parallel: a micro-batch of {tokens} tokens cannot be split over {self.size} "
                "processes; set it to 1, or raise deepspeed.max_tokens_per_micro_batch"
            )
        return [tokens * part // self.size for part in range(self.size + 1)]

    def to_heads(self, heads: Sequence[Tensor], tokens: int) -> list[Tensor]:
        """Own tokens with all heads → all tokens with own heads.

        Args:
            heads: queries, keys and values, [own tokens, heads, head_dim].
            tokens: number of tokens in the whole row.

        Returns:
            Queries, keys and values, [tokens, heads / S, head_dim]. Key-value heads are repeated if each rank would
            otherwise lack those of its query heads.

        Raises:
            UserError: the query heads cannot be divided among the ranks.
        """
        model_support.check_heads(heads[0].shape[1], self.size)
        repeated = [tensor.repeat_interleave(self.size // gcd(self.size, tensor.shape[1]), 1) for tensor in heads]
        by_rank = [tensor.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(2) for tensor in repeated]
        received = self._exchange(torch.cat(by_rank, -1).flatten(0, 1), tokens, to_heads=True)
        parts = received.split([part.shape[-1] for part in by_rank], -1)
        return [part.unflatten(-1, (-1, tensor.shape[-1])) for part, tensor in zip(parts, heads, strict=True)]

    def to_tokens(self, out: Tensor) -> Tensor:
        """[tokens, heads / S, head_dim] → [own tokens, heads, head_dim]."""
        tokens, heads, dim = out.shape
        received = self._exchange(out.flatten(1), tokens, to_heads=False).unflatten(0, (self.size, -1))
        own: Tensor = received.transpose(0, 1).reshape(-1, self.size * heads, dim)
        return own

    def own_heads(self, values: Tensor) -> Tensor:
        """This rank's part of a tensor with one value per query head."""
        own: Tensor = values.view(self.size, -1)[self.number]
        return own

    def _exchange(self, sent: Tensor, tokens: int, to_heads: bool) -> Tensor:
        """Sends a block of rows to each rank: with `to_heads` the rows of the sender's part, else of the receiver's."""
        from torch.distributed.nn.functional import all_to_all_single

        of_parts = [stop - start for start, stop in pairwise(self.bounds(tokens))]
        own = [of_parts[self.number]] * self.size
        into, out_of = (of_parts, own) if to_heads else (own, of_parts)
        received = sent.new_empty(sum(into), sent.shape[1])
        exchanged: Tensor = all_to_all_single(received, sent.contiguous(), into, out_of, group=self.members)
        return exchanged

    def gather(self, values: Tensor, places: Tensor, counts: Sequence[int]) -> Tensor:
        """Gathers the values of all ranks, without gradient.

        Args:
            values: [counts[number], …] values of this rank.
            places: position of each value in the result, those of the first rank first.
            counts: number of values of each rank.
        """
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values.detach()
        of_ranks = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(of_ranks, padded, group=self.members)
        joined = torch.cat([part[:count] for part, count in zip(of_ranks, counts, strict=True)])
        return torch.empty_like(joined).index_copy_(0, places, joined)


def refusal(model: str, cause: str) -> UserError:
    """The error for a model whose packs cannot be split."""
    return UserError(
        f"deepspeed.sequence_parallel: {model} {cause}, so its tokens cannot be split over processes; set it to 1"
    )


def group_of(size: int) -> SequenceGroup:
    """The group of this rank and its neighbours. If there are any, all ranks must call this, after they are connected
    (`start_ranks`).
    """
    if size > 1:
        return _connected(torch.distributed.group.WORLD, size)
    rank = ranks.current()
    return SequenceGroup(0, 1, rank.number, rank.world)


@cache
def _connected(_: Any, size: int) -> SequenceGroup:
    """The group of `size` neighbours in the world of a process; cached, so process groups are created only once."""
    number, world = ranks.current().number, ranks.current().world
    groups = [list(range(first, first + size)) for first in range(0, world, size)]
    of_peers = [list(range(first, world, size)) for first in range(size)]
    members, _ = torch.distributed.new_subgroups_by_enumeration(groups)
    peers, _ = torch.distributed.new_subgroups_by_enumeration(of_peers)
    return SequenceGroup(number % size, size, number // size, world // size, members, peers)
