"""Causal attention within each sequence of a pack, in the form that transformers' AttentionInterface asks for.

Sequences are laid out whole (`layout`), the shorter ones filled up at the end: under a causal mask no real token sees
what is filled in, so no mask is needed for it and the result is that of each sequence alone. Gradients of a shared
prompt's keys and values add up over the sequences that saw them, which is what they would do if each had its own.

Which kernel works on what is laid out depends on where it is: FlashAttention for sequences of different lengths on a
GPU in half precision, two products and a softmax for short sequences in float32 on a CPU (whose scores stay in its
cache), and scaled_dot_product_attention for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from rloo_pipeline.errors import UserError
from rloo_pipeline.training.layout import Block, Layout, Rows

NAME = "rloo_packed"
SHORT = 128
"""Tokens up to which a sequence's scores are kept for the gradient; they are fewer numbers than its activations."""
SCORES = 2**18
"""Scores that are worked on at once: 1 MB, so that a CPU's cache holds them."""


_CALLS: ContextVar[list[str] | None] = ContextVar("calls of attention", default=None)
"""While a pack goes through a model, the layers that have attended."""


@contextmanager
def pack_under_way(model: str, layers: int) -> Iterator[None]:
    """A block in which a pack goes once through a model: attention without its layout is an error, and so is a model
    of which not every layer attends here.

    Args:
        model: its name, for the error.
        layers: how many it has.

    Raises:
        UserError: some layers attend elsewhere, where sequences of a pack would see each other.
    """
    calls: list[str] = []
    before = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(before)
    if len(calls) != layers:
        raise UserError(
            f"{model}: {len(calls)} calls of transformers' attention interface for {layers} layers; packed training "
            "covers models that attend through it once a layer, so take another model"
        )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence.

    Args:
        query: [1, heads, tokens, head_dim]; key: [1, key-value heads, tokens, head_dim]; value: the same with a
            head_dim of its own.
        layout: of the pack; without it, where no pack is under way, the row is one sequence.

    Returns:
        [1, tokens, heads, head_dim of the values].

    Raises:
        UserError: the layer asks for something else than causal attention within each sequence.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    calls = _CALLS.get()
    if calls is not None or layout is not None:
        _refuse(module, attention_mask, layout, others)
    if calls is not None:
        calls.append(type(module).__name__)
    if layout is None:
        return _sdpa(query, key, value, scale, dropout).transpose(1, 2).contiguous(), None
    parts = [heads.squeeze(0).transpose(0, 1) for heads in (query, key, value)]
    at_once = _flash(query) and query.shape[-1] == value.shape[-1] and not dropout
    found = _at_once(parts, layout, scale) if at_once else _by_block(parts, layout, scale, dropout)
    return found.unsqueeze(0), None


MORE = {
    "softcap": "soft-capped attention",
    "s_aux": "attention sinks",
    "position_bias": "a bias of positions",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}
"""What a layer may ask for that is not done here, by the name of its argument."""


def _refuse(module: torch.nn.Module, mask: Tensor | None, layout: Layout | None, others: dict[str, Any]) -> None:
    """Raises where a layer of a pack asks for something else than causal attention within each sequence."""
    asked = [what for name, what in MORE.items() if others.get(name) is not None]
    if mask is not None:
        asked.append("a mask of its own")
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        asked.append("attention that is not causal")
    if layout is None:
        asked.append("attention without the layout of the pack, which its model does not hand on")
    else:
        window, longest = others.get("sliding_window"), layout.blocks[0].tokens
        if window is not None and longest > window:
            asked.append(f"a window of {window} tokens, where a sequence has {longest}")
    if asked:
        raise UserError(
            f"{type(module).__name__} asks for {', '.join(asked)}; packed training covers full causal attention only"
        )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Causal attention of sequences of one length, [sequences, heads, tokens, head_dim]."""
    if query.is_cuda:  # where torch's kernels that keep no scores take as many keys as queries
        below = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(below, 1) for one in (key, value))
    gqa = query.shape[1] > key.shape[1]
    out: Tensor = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa
    )
    return out


def _flash(query: Tensor) -> bool:
    """Whether FlashAttention takes it: from Ampere on."""
    fits = query.dtype in {torch.bfloat16, torch.float16} and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _at_once(heads: Sequence[Tensor], layout: Layout, scale: float) -> Tensor:
    """All sequences at once, of [tokens, heads, head_dim] the same."""
    from torch.nn.attention import varlen

    rows, longest, causal = layout.of_heads(1), layout.blocks[0].tokens, (-1, 0)
    query, key, value = (
        _LaidOut.apply(one.flatten(1), rows).unflatten(1, one.shape[1:])  # type: ignore[no-untyped-call]
        for one in heads
    )
    found: Any = varlen.varlen_attn(
        query, key, value, layout.starts, layout.starts, longest, longest,
        scale=scale, window_size=causal, enable_gqa=True,
    )  # fmt: skip
    taken: Tensor = _Taken.apply(found.flatten(1), rows)  # type: ignore[no-untyped-call]
    return taken.view(heads[0].shape)


def _by_block(heads: Sequence[Tensor], layout: Layout, scale: float, dropout: float) -> Tensor:
    """Block after block, of [tokens, heads, head_dim] the same; the short ones come last."""
    (tokens, count, _), (_, keys, size) = heads[0].shape, heads[2].shape
    of_query, of_key = layout.of_heads(count), layout.of_heads(keys)
    query, key, value = (
        _LaidOut.apply(one.reshape(-1, one.shape[-1]), rows)  # type: ignore[no-untyped-call]
        for one, rows in zip(heads, (of_query, of_key, of_key), strict=True)
    )
    brief = query.device.type == "cpu" and query.dtype == torch.float32 and not dropout
    blocks = [block for block in layout.blocks if not brief or block.tokens > SHORT]
    lengths = [block.sequences * block.tokens for block in blocks]
    left = len(layout.places) - sum(lengths)
    parts = [_cut(one, own, [*lengths, left]) for one, own in ((query, count), (key, keys), (value, keys))]
    found = list[Tensor]()
    for (sequences, length), *some in zip(blocks, *parts, strict=False):
        q, k, v = (one.view(sequences, -1, length, one.shape[-1]) for one in some)
        found.append(_sdpa(q, k, v, scale, dropout).reshape(-1, size))
    if left:
        rest = [one[-1] for one in parts]
        found.append(_Short.apply(*rest, layout.blocks[len(blocks) :], keys, scale))  # type: ignore[no-untyped-call]
    out = torch.cat(found) if len(found) > 1 else found[0]
    taken: Tensor = _Taken.apply(out, of_query)  # type: ignore[no-untyped-call]
    return taken.view(tokens, count, size)


def _cut(laid_out: Tensor, heads: int, lengths: Sequence[int]) -> Sequence[Tensor]:
    """Parts of so many tokens; what is whole is no part, whose gradient would be copied."""
    some = [heads * length for length in lengths if length]
    return laid_out.split(some) if len(some) > 1 else [laid_out]


class _LaidOut(torch.autograd.Function):
    """[tokens · heads, head_dim] → [laid out · heads, head_dim]; gradients of what is there more than once add up."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return heads.index_select(0, rows.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return embedding_bag(ctx.rows.all_of, gradients[0], ctx.rows.starts, mode="sum"), None


class _Taken(torch.autograd.Function):
    """[laid out · heads, head_dim] → [tokens · heads, head_dim]; what nobody takes has a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, laid_out: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return laid_out.index_select(0, rows.back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].index_select(0, ctx.rows.places).index_fill_(0, ctx.rows.untaken, 0), None


class _Short(torch.autograd.Function):
    """softmax(scale · Q·Kᵀ + causal mask)·V of one sequence after the other, [laid out · heads, head_dim].

    The queries of the heads that share a key stand one below the other. With P the softmax and O = P·V: ∂V = Pᵀ·∂O,
    ∂P = ∂O·Vᵀ, ∂S = P ∘ (∂P − rowsum(P ∘ ∂P)), ∂Q = scale · ∂S·K, ∂K = scale · ∂Sᵀ·Q.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], keys: int, scale: float
    ) -> Tensor:
        out, probs = value.new_empty(len(query), value.shape[-1]), list[Tensor]()
        ctx.parts, ctx.scale = list(_parts(blocks, keys, len(query) // len(key))), scale
        for part in ctx.parts:
            q, k, v, found = part.of(query, key, value, out)
            scores = torch.baddbmm(_mask(k.shape[1], q.shape[1] // k.shape[1]), q, k.transpose(1, 2), alpha=scale)
            probs.append(torch.softmax(scores, -1))
            torch.bmm(probs[-1], v, out=found)
        ctx.save_for_backward(query, key, value, *probs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *probs = ctx.saved_tensors
        made = [torch.empty_like(one) for one in (query, key, value)]
        for part, p in zip(ctx.parts, probs, strict=True):
            q, k, v, at_out = part.of(query, key, value, gradients[0])
            at_q, at_k, at_v, _ = part.of(*made, gradients[0])
            at_probs = torch.bmm(at_out, v.transpose(1, 2))
            at_scores = torch.ops.aten._softmax_backward_data(at_probs, p, -1, p.dtype).mul_(ctx.scale)
            torch.bmm(at_scores, k, out=at_q)
            torch.bmm(at_scores.transpose(1, 2), q, out=at_k)
            torch.bmm(p.transpose(1, 2), at_out, out=at_v)
        return *made, None, None, None


class _Part(NamedTuple):
    """Sequences that are worked on at once."""

    pairs: int
    """Their key-value heads."""
    tokens: int
    """Of each sequence."""
    below: int
    """Heads that share a key."""
    start: int
    """Where their keys are laid out."""

    def of(self, *laid_out: Tensor) -> list[Tensor]:
        """Queries, keys, values and outputs, [key-value heads, queries or keys of each, head_dim]."""
        stop = self.start + self.pairs * self.tokens
        return [
            one[self.start * own : stop * own].view(self.pairs, self.tokens * own, -1)
            for one, own in zip(laid_out, (self.below, 1, 1, self.below), strict=True)
        ]


@lru_cache(64)
def _mask(tokens: int, below: int) -> Tensor:
    """[below · tokens, tokens], -∞ where a key is later than its query."""
    return torch.full((tokens, tokens), -torch.inf).triu_(1).repeat(below, 1)


def _parts(blocks: Sequence[Block], keys: int, below: int) -> Iterator[_Part]:
    """Blocks cut into as many sequences as are worked on at once."""
    start = 0
    for sequences, length in blocks:
        most = max(1, SCORES // (keys * below * length * length))
        for first in range(0, sequences, most):
            part = _Part(keys * min(most, sequences - first), length, below, start)
            yield part
            start += part.pairs * length


def register() -> None:
    """Makes the attention known to transformers under the name `NAME`; it makes its own mask, so none is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    no_mask: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, no_mask)
