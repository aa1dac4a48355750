"""Attention over sequences laid out side by side: every kernel gives what each sequence alone would."""

import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from rloo_pipeline.errors import UserError
from rloo_pipeline.training.kernels import attention, short_attention
from rloo_pipeline.training.layout import Block, lay_out

PROMPTS = [4, 4, 4, 9, 1]
COMPLETIONS = [12, 3, 0, 30, 1]
FIRST, OWN = [0, 0, 0, 19, 58], [4, 16, 19, 28, 59]
"""Where prompts and completions begin in the row; three samples share the first prompt."""
TOKENS = 60
SEQUENCES = [
    [*range(first, first + prompt), *range(own, own + completion)]
    for first, prompt, own, completion in zip(FIRST, PROMPTS, OWN, COMPLETIONS, strict=True)
]
LAYOUT = lay_out(*(torch.tensor(values) for values in (FIRST, PROMPTS, OWN, COMPLETIONS)))


def heads(of_values: int = 8) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, of_values))
    return [torch.randn(1, count, TOKENS, size, generator=draw).requires_grad_() for count, size in sizes]


def weighted(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum()


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    out, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, layout=LAYOUT)
    return out, *torch.autograd.grad(weighted(out), (query, key, value))


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same, one sequence at a time; the output of a shared token is that of its first sequence."""
    out: dict[int, torch.Tensor] = {}
    for places in SEQUENCES:
        alone = scaled_dot_product_attention(
            *(tensor[:, :, places] for tensor in (query, key, value)), is_causal=True, enable_gqa=True
        )
        for number, place in enumerate(places):
            out.setdefault(place, alone[0, :, number])
    all_of_it = torch.stack([out[place] for place in range(TOKENS)]).unsqueeze(0)
    return all_of_it, *torch.autograd.grad(weighted(all_of_it), (query, key, value))


def equal(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all((a - b).norm() < 1e-6 * b.norm() for a, b in zip(actual, expected, strict=True))


def test_sequences_of_similar_length_share_a_block_the_longest_first() -> None:
    assert LAYOUT.blocks == (Block(1, 39), Block(1, 16), Block(1, 7), Block(1, 4), Block(1, 2))
    layout = lay_out(*(torch.tensor(values) for values in ([0] * 4, [8] * 4, [8, 16, 23, 24], [8, 7, 1, 6])))
    assert layout.blocks == (Block(3, 16), Block(1, 9))
    assert layout.starts.tolist() == [0, 16, 32, 48, 57]
    assert sorted(set(layout.sources.tolist())) == list(range(30))
    assert layout.sources[layout.first_copy].tolist() == list(range(30))
    index = layout.head_index(2)
    assert index.sources[index.first_copy].tolist() == list(range(60))
    assert sorted([*index.first_copy.tolist(), *index.other_copies.tolist()]) == list(range(2 * 57))
    assert index.sources[:34].tolist() == [*range(0, 16 * 2, 2), *range(1, 16 * 2, 2), 0, 2], "head by head"


@pytest.mark.parametrize(("short", "scores"), [(128, 2**18), (128, 1), (10, 2**18), (0, 2**18)])
def test_each_sequence_alone_gives_the_same(short, scores, monkeypatch) -> None:
    """All by ShortAttention, one sequence at a time, the long ones by SDPA, all by SDPA."""
    monkeypatch.setattr(attention, "SHORT", short)
    monkeypatch.setattr(short_attention, "SCORES", scores)
    assert equal(packed(*heads()), one_by_one(*heads()))


@pytest.mark.parametrize("short", [128, 0])
def test_values_may_have_heads_of_another_size(short, monkeypatch) -> None:
    monkeypatch.setattr(attention, "SHORT", short)
    assert equal(packed(*heads(12)), one_by_one(*heads(12)))


UNSUPPORTED = {
    "soft-capped": {"softcap": 50.0},
    "sinks": {"s_aux": torch.zeros(4)},
    "bias": {"position_bias": torch.zeros(1)},
    "not causal": {"is_causal": False},
    "a window of 38 tokens, where a sequence has 39": {"sliding_window": 38},
    "its own attention mask": {"attention_mask": torch.zeros(1)},
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_anything_but_causal_attention_raises(feature) -> None:
    arguments = {"attention_mask": None, "layout": LAYOUT, **UNSUPPORTED[feature]}
    with pytest.raises(UserError, match=f"Module asks for .*{feature}"):
        attention.packed_attention(torch.nn.Module(), *heads(), **arguments)


def test_a_window_that_no_sequence_exceeds_changes_nothing() -> None:
    plain, _ = attention.packed_attention(torch.nn.Module(), *heads(), None, layout=LAYOUT)
    windowed, _ = attention.packed_attention(torch.nn.Module(), *heads(), None, layout=LAYOUT, sliding_window=39)
    assert torch.equal(plain, windowed)


def test_every_layer_of_a_checked_forward_attends_with_the_layout() -> None:
    def attend(layout):
        return attention.packed_attention(torch.nn.Module(), *heads(), None, layout=layout)

    attend(None)
    with pytest.raises(UserError, match="without the layout"), attention.checked_forward("Model", 1):
        attend(None)
    with pytest.raises(UserError, match="Model: 1 calls of"), attention.checked_forward("Model", 2):
        attend(LAYOUT)
    with attention.checked_forward("Model", 2):
        attend(LAYOUT)
        attend(LAYOUT)
    attend(None)


def test_varlen_attention_is_called_by_its_signature(monkeypatch) -> None:
    """Without a GPU: a stand-in does what varlen_attn is documented to do, with arguments bound to its signature."""
    signature = inspect.signature(varlen.varlen_attn)

    def stand_in(*args, **keywords):
        bound = signature.bind(*args, **keywords).arguments
        assert bound["enable_gqa"]
        assert bound["window_size"] == (-1, 0), "which is causal"
        assert bound["cu_seq_q"].dtype == bound["cu_seq_k"].dtype == torch.int32
        ends = bound["cu_seq_q"].tolist()
        assert max(b - a for a, b in pairwise(ends)) == bound["max_q"] == bound["max_k"]
        parts = [
            scaled_dot_product_attention(
                *(bound[name][a:b].transpose(0, 1) for name in ("query", "key", "value")),
                is_causal=True, scale=bound["scale"], enable_gqa=True,
            ).transpose(0, 1)
            for a, b in pairwise(ends)
        ]  # fmt: skip
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "_supports_flash", lambda _: True)
    assert equal(packed(*heads()), one_by_one(*heads()))
