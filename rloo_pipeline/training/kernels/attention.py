"""Causal attention within each sequence of a pack, as an implementation of transformers' AttentionInterface.

Sequences are laid out in full (`training/layout.py`), the shorter ones padded at the end. Under a causal mask no real
token attends to the padding, so no further mask is needed and each sequence gets the result that it would get alone.
Gradients of a shared prompt's keys and values add up over the sequences that attend to them, as they would if each
sequence had its own copy.

The kernel depends on device and format: FlashAttention over variable lengths on a GPU in half precision, two matrix
products and a softmax for short sequences in float32 on a CPU (`short_attention.py`), and
scaled_dot_product_attention otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from rloo_pipeline.errors import UserError
from rloo_pipeline.training.kernels.short_attention import ShortAttention
from rloo_pipeline.training.layout import HeadIndex, Layout

NAME = "rloo_packed"
"""Name of the attention implementation in transformers."""
SHORT = 128
"""Longest sequence in tokens whose scores are kept for the gradient; they are fewer numbers than its activations."""
UNSUPPORTED = {
    "softcap": "soft-capped attention",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}
"""Features that a layer may ask for and that this attention does not have, by argument name."""

_CALLS: ContextVar[list[str] | None] = ContextVar("calls of attention", default=None)
"""Class names of the layers that have attended in the current forward pass of a pack; None outside of one."""


@contextmanager
def checked_forward(model: str, layers: int) -> Iterator[None]:
    """A block in which a pack goes through a model once, with every layer attending through `packed_attention`.

    Args:
        model: name of the model, for the error.
        layers: number of its layers.

    Raises:
        UserError: some layers attend elsewhere, where the sequences of a pack would see each other.
    """
    calls: list[str] = []
    previous = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(previous)
    if len(calls) != layers:
        raise UserError(
            f"{model}: {len(calls)} calls of transformers' attention interface for {layers} layers; packed training "
            "covers models that attend through it once per layer, so use another model"
        )


def packed_attention(
    module: torch.nn.Module,
    query: Float[Tensor, "batch heads tokens head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    value: Float[Tensor, "batch kv_heads tokens value_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch tokens heads value_dim"], None]:
    """Causal attention within each sequence.

    Args:
        module: the attention layer.
        query: queries of the row; a pack is a batch of 1.
        key: keys of the row.
        value: values of the row.
        attention_mask: must be None for a pack.
        dropout: probability of dropping a score.
        scaling: factor of the scores, by default head_dim^-½.
        layout: layout of the pack; None outside of a pack, where each row is one sequence.
        options: further arguments of the layer, checked for features that are not supported.

    Returns:
        The outputs, and None in place of the scores.

    Raises:
        UserError: the layer asks for something other than causal attention within each sequence.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    calls = _CALLS.get()
    if calls is not None or layout is not None:
        _check_supported(module, attention_mask, layout, options)
    if calls is not None:
        calls.append(type(module).__name__)
    if layout is None:
        return _sdpa(query, key, value, scale, dropout).transpose(1, 2).contiguous(), None
    heads = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    flash = _supports_flash(query) and query.shape[-1] == value.shape[-1] and not dropout
    out = _variable_lengths(heads, layout, scale) if flash else _by_block(heads, layout, scale, dropout)
    return out.unsqueeze(0), None


def register() -> None:
    """Registers the attention with transformers as `NAME`, without a mask: transformers then builds none."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    no_mask: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, no_mask)


def _check_supported(
    module: torch.nn.Module, mask: Tensor | None, layout: Layout | None, options: dict[str, Any]
) -> None:
    """Raises if a layer asks for something other than causal attention within each sequence."""
    problems = [feature for name, feature in UNSUPPORTED.items() if options.get(name) is not None]
    if mask is not None:
        problems.append("its own attention mask")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        problems.append("attention that is not causal")
    if layout is None:
        problems.append("attention without the layout of the pack, which its model does not pass on")
    else:
        window, longest = options.get("sliding_window"), layout.blocks[0].tokens
        if window is not None and longest > window:
            problems.append(f"a window of {window} tokens, where a sequence has {longest}")
    if problems:
        raise UserError(
            f"{type(module).__name__} asks for {', '.join(problems)}; packed training covers full causal attention only"
        )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """Causal attention of sequences of one length, [sequences, heads, tokens, head_dim]."""
    if query.is_cuda:  # torch's memory-efficient CUDA kernels need as many key-value heads as query heads
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    gqa = query.shape[1] > key.shape[1]
    out: Tensor = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa
    )
    return out


def _supports_flash(query: Tensor) -> bool:
    """Whether FlashAttention supports the query's format, head size and GPU (Ampere or newer)."""
    fits = query.dtype in {torch.bfloat16, torch.float16} and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _variable_lengths(heads: Sequence[Tensor], layout: Layout, scale: float) -> Tensor:
    """FlashAttention over all sequences at once; [tokens, heads, head_dim] in and out."""
    from torch.nn.attention import varlen

    index, longest, causal = layout.head_index(1), layout.blocks[0].tokens, (-1, 0)
    query, key, value = (
        _Gather.apply(tensor.flatten(1), index).unflatten(1, tensor.shape[1:])  # type: ignore[no-untyped-call]
        for tensor in heads
    )
    out: Any = varlen.varlen_attn(
        query, key, value, layout.starts, layout.starts, longest, longest,
        scale=scale, window_size=causal, enable_gqa=True,
    )  # fmt: skip
    in_row: Tensor = _Return.apply(out.flatten(1), index)  # type: ignore[no-untyped-call]
    return in_row.view(heads[0].shape)


def _by_block(heads: Sequence[Tensor], layout: Layout, scale: float, dropout: float) -> Tensor:
    """Attention block by block; [tokens, heads, head_dim] in and out. The blocks of short sequences come last."""
    (tokens, query_heads, _), (_, kv_heads, value_dim) = heads[0].shape, heads[2].shape
    query_index, kv_index = layout.head_index(query_heads), layout.head_index(kv_heads)
    query, key, value = (
        _Gather.apply(tensor.reshape(-1, tensor.shape[-1]), index)  # type: ignore[no-untyped-call]
        for tensor, index in zip(heads, (query_index, kv_index, kv_index), strict=True)
    )
    use_short = query.device.type == "cpu" and query.dtype == torch.float32 and not dropout
    blocks = [block for block in layout.blocks if not use_short or block.tokens > SHORT]
    lengths = [block.sequences * block.tokens for block in blocks]
    short_tokens = len(layout.sources) - sum(lengths)
    counts = query_heads, kv_heads, kv_heads
    parts = [
        _split(tensor, count, [*lengths, short_tokens])
        for tensor, count in zip((query, key, value), counts, strict=True)
    ]
    outputs = list[Tensor]()
    for (sequences, length), *of_block in zip(blocks, *parts, strict=False):
        q, k, v = (tensor.view(sequences, -1, length, tensor.shape[-1]) for tensor in of_block)
        outputs.append(_sdpa(q, k, v, scale, dropout).reshape(-1, value_dim))
    if short_tokens:
        short = [part[-1] for part in parts]
        short_blocks = layout.blocks[len(blocks) :]
        outputs.append(ShortAttention.apply(*short, short_blocks, kv_heads, scale))  # type: ignore[no-untyped-call]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    in_row: Tensor = _Return.apply(out, query_index)  # type: ignore[no-untyped-call]
    return in_row.view(tokens, query_heads, value_dim)


def _split(laid_out: Tensor, heads: int, lengths: Sequence[int]) -> Sequence[Tensor]:
    """Parts of these lengths in tokens. A single part is not split: that would copy its gradient."""
    sizes = [heads * length for length in lengths if length]
    return laid_out.split(sizes) if len(sizes) > 1 else [laid_out]


class _Gather(torch.autograd.Function):
    """[tokens · heads, head_dim] → [laid out · heads, head_dim]; gradients of all copies of an entry add up."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, index: HeadIndex) -> Tensor:
        ctx.index = index
        return heads.index_select(0, index.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return embedding_bag(ctx.index.copies, gradients[0], ctx.index.starts, mode="sum"), None


class _Return(torch.autograd.Function):
    """[laid out · heads, head_dim] → [tokens · heads, head_dim]; only first copies have a gradient."""

    @staticmethod
    def forward(ctx: Any, laid_out: Tensor, index: HeadIndex) -> Tensor:
        ctx.index = index
        return laid_out.index_select(0, index.first_copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index = ctx.index
        return gradients[0].index_select(0, index.sources).index_fill_(0, index.other_copies, 0), None
