"""Packing: sequences of different lengths in one row without padding, and attention that keeps them apart.

Samples of one prompt stand behind it and share it: every layer but attention works on the flat row, where a prompt is
once. In attention each sequence is laid out whole, prompt and completion, short ones filled up at the end; under a
causal mask no real token sees what is filled in, so no mask is needed and the result is that of each sequence alone.
Gradients of a shared prompt's keys and values add up over the sequences that saw them, which is what they would do if
each had its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "rloo_packed"


class Pack(NamedTuple):
    """Some sequences of prompt and completion in one row."""

    input_ids: Tensor
    """[1, tokens]"""
    position_ids: Tensor
    """[1, tokens], from 0 in each sequence"""
    layout: Tensor
    """[sequences, longest sequence], the place in the row of each token of a sequence; 0 where it is filled up"""
    back: Tensor
    """[tokens], the place of each token of the row in the flattened layout; of a shared one its first"""
    predicting: Tensor
    """[completion tokens], the places in the row whose logits predict a completion token"""
    targets: Tensor
    """[completion tokens], those tokens"""
    completion_lengths: Tensor
    """[sequences]"""

    def to(self, device: torch.device) -> Pack:
        """The pack on another device."""
        return Pack(*(tensor.to(device, non_blocking=True) for tensor in self))

    def inputs(self) -> dict[str, Tensor]:
        """What the model's layers are called with."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "layout": self.layout,
            "back": self.back,
        }

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
    prompt).
    """
    longest = max(len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True))
    # plain integers: tensors of a few of them each would cost more than all the rest
    row, positions, back, layout, predicting = list[int](), list[int](), list[int](), list[int](), list[int]()
    start = 0
    for number, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        length, end, first = len(prompt), len(prompt) + len(ids), number * longest
        if number == 0 or prompt != prompts[number - 1]:
            start = len(row)
            row += prompt
            positions += range(length)
            back += range(first, first + length)
        own = len(row)
        row += ids
        positions += range(length, end)
        back += range(first + length, first + end)
        layout += range(start, start + length)
        layout += range(own, len(row))
        layout += [0] * (longest - end)
        predicting.append(start + length - 1)
        predicting += range(own, len(row) - 1)
    return Pack(
        input_ids=torch.tensor(row).unsqueeze(0),
        position_ids=torch.tensor(positions).unsqueeze(0),
        layout=torch.tensor(layout).view(len(prompts), longest),
        back=torch.tensor(back),
        predicting=torch.tensor(predicting),
        targets=torch.tensor([token for ids in completions for token in ids]),
        completion_lengths=torch.tensor([len(ids) for ids in completions]),
    )


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Tensor | None = None,
    back: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a pack, in the form that transformers' AttentionInterface asks for.

    Args:
        query: [1, heads, tokens, head_dim]; key and value: [1, key-value heads, tokens, head_dim].
        layout, back: of the pack; without them the row is one sequence.

    Returns:
        [1, tokens, heads, head_dim].
    """
    if layout is None or back is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    places = layout.flatten()

    def side_by_side(heads: Tensor) -> Tensor:
        flat = heads[0].transpose(0, 1)
        return flat.index_select(0, places).view(*layout.shape, *flat.shape[1:]).transpose(1, 2)

    out = scaled_dot_product_attention(
        side_by_side(query),
        side_by_side(key),
        side_by_side(value),
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, back).unsqueeze(0), None


def register() -> None:
    """Makes the attention known to transformers under the name `ATTENTION`; it makes its own mask, so none is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
