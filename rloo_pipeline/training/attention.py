"""Causal attention within each sequence of a pack, in the form that transformers' AttentionInterface asks for.

The row of a pack holds a prompt once, its samples behind it. Here each sequence is laid out whole, prompt and
completion, beside others of about its length, the shorter ones filled up at the end: under a causal mask no real token
sees what is filled in, so no mask is needed for it and the result is that of each sequence alone. Gradients of a shared
prompt's keys and values add up over the sequences that saw them, which is what they would do if each had its own.

Which kernel works on what is laid out depends on where it is: FlashAttention for sequences of different lengths on a
GPU in half precision, two products and a softmax for short sequences in float32 on a CPU (whose scores stay in its
cache), and scaled_dot_product_attention for all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "rloo_packed"
LIKE = 7 / 8
"""Sequences of at least this share of the longest stand beside it: at most 1 / LIKE² of the work is for filling."""
SHORT = 128
"""Tokens up to which a sequence's scores are kept for the gradient; they are fewer numbers than its activations."""
SCORES = 2**18
"""Scores that are worked on at once: 1 MB, so that a CPU's cache holds them."""


class Block(NamedTuple):
    """Sequences of about the same length."""

    sequences: int
    tokens: int
    """To which each is filled up."""


class Layout(NamedTuple):
    """Where the tokens of sequences are, laid out for attention block by block."""

    places: Tensor
    """[laid out], the place in the row of each token; 0 where a sequence is filled up"""
    back: Tensor
    """[tokens], the place among those laid out of each token of the row; of a shared one its first"""
    starts: Tensor
    """[sequences + 1] int32, where each sequence begins among those laid out, and the end"""
    blocks: tuple[Block, ...]
    """The longest first."""

    def to(self, device: torch.device) -> Layout:
        """The layout on another device."""
        places, back, starts = (tensor.to(device, non_blocking=True) for tensor in self[:3])
        return Layout(places, back, starts, self.blocks)


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
    return Layout(places.where(real, 0), back, starts.int(), blocks)


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


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence.

    Args:
        query: [1, heads, tokens, head_dim]; key and value: [1, key-value heads, tokens, head_dim].
        layout: of the pack; without it the row is one sequence.

    Returns:
        [1, tokens, heads, head_dim].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    laid_out = [heads.squeeze(0).transpose(0, 1).index_select(0, layout.places) for heads in (query, key, value)]
    if _flash(query) and not dropout:
        found = _varlen(laid_out, layout, scale)
    else:
        found = _by_block(laid_out, layout, scale, dropout)
    return found.index_select(0, layout.back).unsqueeze(0), None


def _flash(query: Tensor) -> bool:
    """Whether FlashAttention takes it: from Ampere on."""
    fits = query.dtype in {torch.bfloat16, torch.float16} and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(laid_out: Sequence[Tensor], layout: Layout, scale: float) -> Tensor:
    """All sequences at once, [laid out, heads, head_dim]."""
    from torch.nn.attention import varlen

    (query, key, value), longest, causal = laid_out, layout.blocks[0].tokens, (-1, 0)
    found: Any = varlen.varlen_attn(
        query, key, value, layout.starts, layout.starts, longest, longest,
        scale=scale, window_size=causal, enable_gqa=True,
    )  # fmt: skip
    return found  # type: ignore[no-any-return]


def _by_block(laid_out: Sequence[Tensor], layout: Layout, scale: float, dropout: float) -> Tensor:
    """Block after block, [laid out, heads, head_dim]; the short ones come last."""
    brief = laid_out[0].device.type == "cpu" and laid_out[0].dtype == torch.float32 and not dropout
    blocks = [block for block in layout.blocks if not brief or block.tokens > SHORT]
    found, start = list[Tensor](), 0
    for count, length in blocks:
        part = slice(start, start + count * length)
        query, key, value = (one[part].view(count, length, *one.shape[1:]).transpose(1, 2) for one in laid_out)
        out = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
        )
        found.append(out.transpose(1, 2).flatten(0, 1))
        start = part.stop
    if len(blocks) < len(layout.blocks):
        rest = [one[start:] for one in laid_out] if start else laid_out
        found.append(_Short.apply(*rest, layout.blocks[len(blocks) :], scale))  # type: ignore[no-untyped-call]
    return torch.cat(found) if len(found) > 1 else found[0]


class _Short(torch.autograd.Function):
    """softmax(scale · Q·Kᵀ + causal mask)·V of one sequence after the other, [laid out, heads, head_dim].

    The queries of the heads that share a key stand one below the other. With P the softmax and O = P·V: ∂V = Pᵀ·∂O,
    ∂P = ∂O·Vᵀ, ∂S = P ∘ (∂P − rowsum(P ∘ ∂P)), ∂Q = scale · ∂S·K, ∂K = scale · ∂Sᵀ·Q.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
        out, probs, keys = torch.empty_like(query), list[Tensor](), key.shape[1]
        ctx.parts = list(_parts(blocks, query.shape[1]))
        for part, (count, length) in ctx.parts:
            q, k, v = (_by_key(one[part], count, keys) for one in (query, key, value))
            scores = torch.baddbmm(_mask(length, query.shape[1] // keys), q, k.transpose(1, 2), alpha=scale)
            probs.append(torch.softmax(scores, -1))
            _into(out[part], torch.bmm(probs[-1], v), count)
        ctx.save_for_backward(query, key, value, *probs)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *probs = ctx.saved_tensors
        found, keys = [torch.empty_like(one) for one in (query, key, value)], key.shape[1]
        for (part, (count, _)), p in zip(ctx.parts, probs, strict=True):
            q, k, v, at_out = (_by_key(one[part], count, keys) for one in (query, key, value, gradients[0]))
            at_probs = torch.bmm(at_out, v.transpose(1, 2))
            at_scores = torch.ops.aten._softmax_backward_data(at_probs, p, -1, p.dtype)
            made = at_scores @ k, at_scores.transpose(1, 2) @ q, p.transpose(1, 2) @ at_out
            for into, values, factor in zip(found, made, (ctx.scale, ctx.scale, 1.0), strict=True):
                _into(into[part], values, count, factor)
        return *found, None, None


@lru_cache(64)
def _mask(tokens: int, below: int) -> Tensor:
    """[below · tokens, tokens], -∞ where a key is later than its query."""
    return torch.full((tokens, tokens), -torch.inf).triu_(1).repeat(below, 1)


def _by_key(laid_out: Tensor, sequences: int, keys: int) -> Tensor:
    """[laid out, heads, head_dim] → [sequences · key-value heads, queries or keys of each, head_dim]."""
    heads = laid_out.view(sequences, -1, *laid_out.shape[1:]).transpose(1, 2)
    return heads.reshape(sequences * keys, -1, heads.shape[-1])


def _into(laid_out: Tensor, values: Tensor, sequences: int, factor: float = 1.0) -> None:
    """Takes `factor` times what `_by_key` gives back to where it was."""
    places = laid_out.view(sequences, -1, *laid_out.shape[1:]).transpose(1, 2)
    torch.mul(values.view(places.shape), factor, out=places)


def _parts(blocks: Sequence[Block], heads: int) -> Iterator[tuple[slice, Block]]:
    """Blocks cut into as many sequences as are worked on at once, and where they are laid out."""
    start = 0
    for count, length in blocks:
        most = max(1, SCORES // (heads * length * length))
        for first in range(0, count, most):
            block = Block(min(most, count - first), length)
            yield slice(start, start + block.sequences * length), block
            start += block.sequences * length


def register() -> None:
    """Makes the attention known to transformers under the name `NAME`; it makes its own mask, so none is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    no_mask: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, no_mask)
