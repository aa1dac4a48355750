"""Causal attention within each sequence of a pack, as an implementation of transformers' AttentionInterface.

Sequences are laid out in full (`training/layout.py`), the shorter ones padded at the end. Under a causal mask no real
token attends to the padding, so no further mask is needed and each sequence gets the result that it would get alone.
Gradients of a shared prompt's keys and values add up over the sequences that attend to them, as they would if each
sequence had its own copy.

The kernel depends on device and format: FlashAttention over variable lengths on a GPU in half precision, two matrix
products and a softmax for short sequences in float32 on a CPU (`short_attention.py`), and
scaled_dot_product_attention otherwise. None of these supports soft caps and sinks, which `_eager` computes.

Windows come from transformers' own masks: `_describe_mask` returns a description of one sequence's mask instead of a
mask, so a layer has the window that it has in plain transformers, whichever key of config.json sets it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from rloo_pipeline.errors import UserError
from rloo_pipeline.training.kernels.flash_attention_3 import flash_attention
from rloo_pipeline.training.kernels.short_attention import Local, ShortAttention, mask_of
from rloo_pipeline.training.layout import Gather, Layout, Scatter

NAME = "rloo_packed"
"""Name of the attention implementation in transformers."""
SHORT = 128
"""Maximum sequence length at which scores are kept for the gradient; up to it they are smaller than the activations."""
UNSUPPORTED = {"position_bias": "a position bias", "indices": "sparse attention", "block_indices": "sparse attention"}
"""Features that a layer may ask for but this attention lacks, by argument name."""

DESCRIPTION = "rloo_local"
"""Attribute of the value that layers get instead of a mask."""

_CALLS: ContextVar[list[str] | None] = ContextVar("calls of attention", default=None)
"""Class names of the layers that have attended in the current forward pass of a pack; None outside of one."""


class Scores(NamedTuple):
    """Formula of attention weights from queries and keys."""

    scale: float
    dropout: float = 0.0
    local: Local | None = None
    """The window; None attends to all earlier tokens."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """[query heads] an additional score in each softmax, whose weight is dropped (gpt-oss)."""

    @property
    def plain(self) -> bool:
        """True if PyTorch's kernels can compute them."""
        return self.softcap is None and self.sinks is None


@contextmanager
def checked_forward(model: str, layers: int) -> Iterator[None]:
    """A block in which a pack goes through a model once, with every layer attending through `packed_attention`.

    Args:
        model: name of the model, for the error.
        layers: number of its layers.

    Raises:
        UserError: some layers attend in another way, which would mix the sequences of a pack.
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "batch tokens heads value_dim"], None]:
    """Causal attention within each sequence.

    Args:
        module: the attention layer.
        query: queries of the row; a pack is a batch of 1.
        key: keys of the row.
        value: values of the row.
        attention_mask: result of `_describe_mask`.
        dropout: probability of dropping a score.
        scaling: factor of the scores, by default head_dim^-½.
        layout: layout of the pack; None outside of a pack, where each row is one sequence.
        softcap: soft cap of the scores.
        s_aux: sinks, one per query head.
        options: further arguments of the layer, checked for features that are not supported.

    Returns:
        The outputs, and None in place of the scores.

    Raises:
        UserError: the layer asks for something other than causal attention within each sequence.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    local = getattr(attention_mask, DESCRIPTION, None)
    if local is not None and local.size >= (query.shape[-2] if layout is None else len(layout.first_copy)):
        local = None
    scores = Scores(scale, dropout, local, softcap, s_aux)
    calls = _CALLS.get()
    if calls is not None or layout is not None:
        _check_supported(module, attention_mask, layout, options)
    if calls is not None:
        calls.append(type(module).__name__)
    if layout is None:
        return _of_equal_lengths(query, key, value, scores).transpose(1, 2).contiguous(), None
    heads, group = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)], layout.group
    if group is not None:
        heads = group.to_heads(heads, len(layout.first_copy))
        scores = scores if s_aux is None else scores._replace(sinks=group.own_heads(s_aux))
    attend = _variable_lengths if _supports_flash(query, value, scores) else _by_block
    out = attend(heads, layout, scores)
    return (out if group is None else group.to_tokens(out)).unsqueeze(0), None


@cache
def _untraced(function: Callable[..., object]) -> Callable[..., object]:
    """The function, always the same object, which torch.compile leaves out of its graphs."""
    untraced: Callable[..., object] = torch.compiler.disable(function)
    return untraced


def register() -> None:
    """Registers the attention with transformers as `NAME`, with descriptions in place of masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _untraced(packed_attention))
    AttentionMaskInterface.register(NAME, _describe_mask)


def _describe_mask(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> Tensor | None:
    """Describes a mask of transformers: None for causal attention, else a number with the attribute `DESCRIPTION`.

    Args:
        mask_function: returns True if a query attends to a key, given their positions.
        local_size: tokens of the window or chunk.
        use_vmap: True if the model adds rules of its own, which cannot be described; `packed_attention` then refuses.
    """
    if local_size is None and not use_vmap:
        return None
    description = torch.tensor(local_size or 0)
    if local_size is not None and not use_vmap:
        first, before = torch.tensor([0, -1])  # `before` is in another chunk; as indices, a row of any length has both
        window = bool(mask_function(first, first, first, before))
        setattr(description, DESCRIPTION, Local(local_size, chunked=not window))
    return description


def _check_supported(
    module: torch.nn.Module, mask: Tensor | None, layout: Layout | None, options: dict[str, Any]
) -> None:
    """Raises UserError if a layer asks for something that this attention lacks."""
    problems = [feature for name, feature in UNSUPPORTED.items() if options.get(name) is not None]
    if mask is not None and not hasattr(mask, DESCRIPTION):
        problems.append("its own attention mask")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        problems.append("attention that is not causal")
    if layout is None:
        problems.append("attention without the layout of the pack, which its model does not pass on")
    if problems:
        raise UserError(f"{type(module).__name__} asks for {', '.join(problems)}")


def _of_equal_lengths(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attention of sequences of one length, [sequences, heads, tokens, head_dim]."""
    tokens, group = query.shape[-2], query.shape[1] // key.shape[1]
    is_masked = scores.local is not None and tokens > scores.local.size
    # with a mask torch takes a kernel that can drop scores, which FlashAttention 3 cannot
    is_masked |= scores.dropout > 0 and current_flash_attention_impl() is not None
    mask = mask_of(tokens, scores.local, query.device) if is_masked else None
    if query.is_cuda or not scores.plain:  # torch's memory-efficient CUDA kernels cannot share key-value heads
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    if not scores.plain:
        return _eager(query, key, value, scores)
    gqa = query.shape[1] > key.shape[1]
    out: Tensor = scaled_dot_product_attention(
        query, key, value, mask, scores.dropout, is_causal=mask is None, scale=scores.scale, enable_gqa=gqa
    )
    return out


def _eager(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """The formula itself, with soft cap and sinks; it holds all weights in memory."""
    products = query @ key.transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        products = (products / scores.softcap).tanh() * scores.softcap
    products = products.masked_fill(~mask_of(query.shape[-2], scores.local, query.device), -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(products.dtype).view(1, -1, 1, 1).expand(*products.shape[:-1], 1)
        products = torch.cat([products, sinks], -1)
    weights = products.softmax(-1, torch.float64 if query.dtype == torch.float64 else torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights[..., : key.shape[-2]], scores.dropout) @ value


def _supports_flash(query: Tensor, value: Tensor, scores: Scores) -> bool:
    """True if FlashAttention supports these scores, the query's format and head size, and its GPU (Ampere or newer)."""
    chunked = scores.local is not None and scores.local.chunked
    if not query.is_cuda or scores.dropout or chunked or not scores.plain or query.shape[-1] != value.shape[-1]:
        return False
    fits = query.dtype in {torch.bfloat16, torch.float16} and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _variable_lengths(heads: Sequence[Tensor], layout: Layout, scores: Scores) -> Tensor:
    """FlashAttention over all sequences at once; [tokens, heads, head_dim] in and out."""
    index, longest = layout.head_index(1), layout.blocks[0].tokens
    window = 0 if scores.local is None else scores.local.size
    laid_out = [
        Gather.apply(tensor.flatten(1), index).unflatten(1, tensor.shape[1:])  # type: ignore[no-untyped-call]
        for tensor in heads
    ]
    out = flash_attention(laid_out, layout.starts, longest, scores.scale, window)
    in_row: Tensor = Scatter.apply(out.flatten(1), index)  # type: ignore[no-untyped-call]
    return in_row.view(heads[0].shape)


def _by_block(heads: Sequence[Tensor], layout: Layout, scores: Scores) -> Tensor:
    """Attention block by block; [tokens, heads, head_dim] in and out. The blocks of short sequences come last."""
    (tokens, query_heads, _), (_, kv_heads, value_dim) = heads[0].shape, heads[2].shape
    query_index, kv_index = layout.head_index(query_heads), layout.head_index(kv_heads)
    query, key, value = (
        Gather.apply(tensor.reshape(-1, tensor.shape[-1]), index)  # type: ignore[no-untyped-call]
        for tensor, index in zip(heads, (query_index, kv_index, kv_index), strict=True)
    )
    on_cpu = query.device.type == "cpu" and query.dtype == torch.float32
    use_short = on_cpu and not scores.dropout and scores.plain
    blocks = [block for block in layout.blocks if not use_short or block.tokens > SHORT]
    lengths = [block.sequences * block.tokens for block in blocks]
    short_tokens = len(layout.sources) - sum(lengths)
    parts = [
        _split(tensor, count, [*lengths, short_tokens])
        for tensor, count in ((query, query_heads), (key, kv_heads), (value, kv_heads))
    ]
    outputs = list[Tensor]()
    for (sequences, length), *of_block in zip(blocks, *parts, strict=False):
        q, k, v = (tensor.view(sequences, -1, length, tensor.shape[-1]) for tensor in of_block)
        outputs.append(_of_equal_lengths(q, k, v, scores).reshape(-1, value_dim))
    if short_tokens:
        short, short_blocks = [part[-1] for part in parts], layout.blocks[len(blocks) :]
        outputs.append(ShortAttention.apply(*short, short_blocks, kv_heads, scores.scale, scores.local))  # type: ignore[no-untyped-call]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    in_row: Tensor = Scatter.apply(out, query_index)  # type: ignore[no-untyped-call]
    return in_row.view(tokens, query_heads, value_dim)


def _split(laid_out: Tensor, heads: int, lengths: Sequence[int]) -> Sequence[Tensor]:
    """Splits into parts of these lengths in tokens. A single part is not split, which would copy its gradient."""
    sizes = [heads * length for length in lengths if length]
    return laid_out.split(sizes) if len(sizes) > 1 else [laid_out]
