"""Causal attention of short sequences in float32 on a CPU: two matrix products and a softmax.

Sequences are processed a few at a time, so that their scores stay in the CPU's cache.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rloo_pipeline.training.layout import Block

SCORES = 2**18
"""Number of scores computed at once: 1 MB."""


class Local(NamedTuple):
    """A window: attention to only some of the earlier tokens."""

    size: int
    """Maximum number of tokens that a token attends to, including itself."""
    chunked: bool
    """If True, a token attends within its own chunk of `size` tokens (Llama 4); if False, to the last `size` tokens."""


class ShortAttention(torch.autograd.Function):
    """softmax(scale · Q·Kᵀ + causal mask)·V of each sequence; a row is one head of one token of the layout.

    The queries of the heads that share a key-value head are stacked into one matrix. With P the softmax and O = P·V:
    ∂V = Pᵀ·∂O, ∂P = ∂O·Vᵀ, ∂S = P ∘ (∂P − rowsum(P ∘ ∂P)), ∂Q = scale · ∂S·K, ∂K = scale · ∂Sᵀ·Q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "queries head_dim"],
        key: Float[Tensor, "keys head_dim"],
        value: Float[Tensor, "keys value_dim"],
        blocks: Sequence[Block],
        kv_heads: int,
        scale: float,
        local: Local | None = None,
    ) -> Float[Tensor, "queries value_dim"]:
        """Computes the outputs and keeps the softmax for the gradient."""
        out, probs = value.new_empty(len(query), value.shape[-1]), list[Tensor]()
        ctx.chunks, ctx.scale = list(_chunks(blocks, kv_heads, len(query) // len(key))), scale
        for chunk in ctx.chunks:
            q, k, v, chunk_out = chunk.of(query, key, value, out)
            mask = _additive_mask(k.shape[1], q.shape[1] // k.shape[1], local)
            probs.append(torch.softmax(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale), -1))
            torch.bmm(probs[-1], v, out=chunk_out)
        ctx.save_for_backward(query, key, value, *probs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of query, key and value."""
        query, key, value, *probs = ctx.saved_tensors
        d_inputs = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for chunk, p in zip(ctx.chunks, probs, strict=True):
            q, k, v, d_out = chunk.of(query, key, value, gradients[0])
            d_q, d_k, d_v, _ = chunk.of(*d_inputs, gradients[0])
            d_probs = torch.bmm(d_out, v.transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_probs, p, -1, p.dtype).mul_(ctx.scale)
            torch.bmm(d_scores, k, out=d_q)
            torch.bmm(d_scores.transpose(1, 2), q, out=d_k)
            torch.bmm(p.transpose(1, 2), d_out, out=d_v)
        return *d_inputs, None, None, None, None


class _Chunk(NamedTuple):
    """Sequences of one length that are processed at once."""

    pairs: int
    """Sequences times key-value heads."""
    tokens: int
    """Tokens per sequence."""
    group: int
    """Query heads per key-value head."""
    start: int
    """Index of their first key in the layout."""

    def of(self, *laid_out: Tensor) -> list[Tensor]:
        """Queries, keys, values and outputs of the chunk, [pairs, tokens (times group), head_dim]."""
        stop = self.start + self.pairs * self.tokens
        return [
            tensor[self.start * heads : stop * heads].view(self.pairs, self.tokens * heads, -1)
            for tensor, heads in zip(laid_out, (self.group, 1, 1, self.group), strict=True)
        ]


def _chunks(blocks: Sequence[Block], kv_heads: int, group: int) -> Iterator[_Chunk]:
    """Splits blocks into chunks of at most SCORES scores."""
    start = 0
    for sequences, length in blocks:
        at_once = max(1, SCORES // (kv_heads * group * length * length))
        for first in range(0, sequences, at_once):
            chunk = _Chunk(kv_heads * min(at_once, sequences - first), length, group, start)
            yield chunk
            start += chunk.pairs * length


@lru_cache(64)
def _additive_mask(tokens: int, group: int, local: Local | None) -> Tensor:
    """[group · tokens, tokens]: −∞ where a query does not attend to a key, else 0."""
    mask = mask_of(tokens, local, torch.device("cpu"))
    return torch.zeros(tokens, tokens).masked_fill_(~mask, -torch.inf).repeat(group, 1)


def mask_of(tokens: int, local: Local | None, device: torch.device) -> Bool[Tensor, "tokens tokens"]:
    """True where a query (row) attends to a key (column) of its sequence."""
    query, key = torch.arange(tokens, device=device).unsqueeze(-1), torch.arange(tokens, device=device)
    causal = key <= query
    if local is None or tokens <= local.size:
        return causal
    if local.chunked:
        return causal & (key // local.size == query // local.size)
    return causal & (key > query - local.size)
