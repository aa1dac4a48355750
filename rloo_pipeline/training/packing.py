"""Packing: sequences of different lengths in one row without padding, and attention that keeps them apart.

All layers but attention work on the flat row of tokens. In attention, sequences are laid side by side, short ones
filled up at the end; under a causal mask no real token sees what is filled in, so no mask is needed and the result is
that of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION = "rloo_packed"


class Pack(NamedTuple):
    """Some sequences of prompt and completion in one row."""

    input_ids: Tensor
    """[1, tokens]"""
    position_ids: Tensor
    """[1, tokens], from 0 in each sequence"""
    sequence: Tensor
    """[tokens], the sequence that each token is of"""
    predicting: Tensor
    """[completion tokens], the places in the row whose logits predict a completion token"""
    targets: Tensor
    """[completion tokens], those tokens"""
    completion_lengths: Tensor
    """[sequences]"""

    def to(self, device: torch.device) -> Pack:
        """The pack on another device."""
        return Pack(*(tensor.to(device, non_blocking=True) for tensor in self))

    def unpack(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the completion tokens, [completion tokens], as [sequences, longest] and the bool mask of real
        places.
        """
        longest = int(self.completion_lengths.max())
        mask = torch.arange(longest, device=values.device) < self.completion_lengths.unsqueeze(-1)
        return values.new_zeros(mask.shape).masked_scatter(mask, values), mask


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Pack:
    """Packs sequences; prompts and completions must not be empty (the first completion token is predicted from the
    prompt).
    """
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    starts = lengths.cumsum(0) - lengths
    position = torch.cat([torch.arange(len(row)) for row in rows])
    predicting = [
        torch.arange(int(start) + len(prompt) - 1, int(start) + len(row) - 1)
        for start, prompt, row in zip(starts, prompts, rows, strict=True)
    ]
    return Pack(
        input_ids=torch.tensor([token for row in rows for token in row]).unsqueeze(0),
        position_ids=position.unsqueeze(0),
        sequence=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        predicting=torch.cat(predicting),
        targets=torch.tensor([token for completion in completions for token in completion]),
        completion_lengths=torch.tensor([len(completion) for completion in completions]),
    )


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of sequences cut into micro-batches of at most `max_tokens` tokens, longest first, so that each holds
    its likes.

    A single sequence over the limit has a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    dropout: float = 0.0,
    scaling: float | None = None,
    sequence: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a pack, in the form that transformers' AttentionInterface asks for.

    Args:
        query: [1, heads, tokens, head_dim]; key and value: [1, key-value heads, tokens, head_dim].
        sequence, position_ids: of the pack; without them the row is one sequence.

    Returns:
        [1, tokens, heads, head_dim].
    """
    if sequence is None or position_ids is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    position = position_ids[0]
    shape = (int(sequence[-1]) + 1, int(position.max()) + 1)

    def side_by_side(heads: Tensor) -> Tensor:
        flat = heads[0].transpose(0, 1)
        filled = flat.new_zeros(*shape, *flat.shape[1:]).index_put((sequence, position), flat)
        return filled.transpose(1, 2)

    out = scaled_dot_product_attention(
        side_by_side(query),
        side_by_side(key),
        side_by_side(value),
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2)[sequence, position].unsqueeze(0), None


def register() -> None:
    """Makes the attention known to transformers under the name `ATTENTION`; it makes its own mask, so none is built."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
