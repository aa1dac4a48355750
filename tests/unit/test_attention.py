"""Attention over sequences laid out side by side: every kernel gives what each sequence alone would."""

import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from rloo_pipeline.training import attention
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


def heads() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, count, TOKENS, 8, generator=draw).requires_grad_() for count in (4, 2, 2)]


def weighted(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum()


def found(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    out, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, layout=LAYOUT)
    return out, *torch.autograd.grad(weighted(out), (query, key, value))


def wanted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same by each sequence alone; a shared token's output is that of the first that has it."""
    out: dict[int, torch.Tensor] = {}
    for places in SEQUENCES:
        alone = scaled_dot_product_attention(
            *(one[:, :, places] for one in (query, key, value)), is_causal=True, enable_gqa=True
        )
        for number, place in enumerate(places):
            out.setdefault(place, alone[0, :, number])
    all_of_it = torch.stack([out[place] for place in range(TOKENS)]).unsqueeze(0)
    return all_of_it, *torch.autograd.grad(weighted(all_of_it), (query, key, value))


def equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    return all((one - other).norm() < 1e-6 * other.norm() for one, other in zip(ours, theirs, strict=True))


def test_likes_stand_beside_each_other_the_longest_first() -> None:
    assert LAYOUT.blocks == (Block(1, 39), Block(1, 16), Block(1, 7), Block(1, 4), Block(1, 2))
    likes = lay_out(*(torch.tensor(values) for values in ([0] * 4, [8] * 4, [8, 16, 23, 24], [8, 7, 1, 6])))
    assert likes.blocks == (Block(3, 16), Block(1, 9))
    assert likes.starts.tolist() == [0, 16, 32, 48, 57]
    assert sorted(set(likes.places.tolist())) == list(range(30))
    assert likes.places[likes.back].tolist() == list(range(30))
    rows = likes.of_heads(2)
    assert rows.places[rows.back].tolist() == list(range(60))
    assert sorted([*rows.back.tolist(), *rows.untaken.tolist()]) == list(range(2 * 57))
    assert rows.places[:34].tolist() == [*range(0, 16 * 2, 2), *range(1, 16 * 2, 2), 0, 2], "head by head"


@pytest.mark.parametrize(("short", "scores"), [(128, 2**18), (128, 1), (10, 2**18), (0, 2**18)])
def test_each_sequence_alone_gives_the_same(short, scores, monkeypatch) -> None:
    """All by products and softmax, one sequence at a time, the long ones by SDPA, all by SDPA."""
    monkeypatch.setattr(attention, "SHORT", short)
    monkeypatch.setattr(attention, "SCORES", scores)
    assert equal(found(*heads()), wanted(*heads()))


def test_varlen_attention_is_called_as_it_wants_to_be(monkeypatch) -> None:
    """No GPU here: what it is documented to do is done in its place, on arguments that its signature takes."""
    signature = inspect.signature(varlen.varlen_attn)

    def in_place(*args, **named):
        given = signature.bind(*args, **named).arguments
        assert given["enable_gqa"]
        assert given["window_size"] == (-1, 0), "which is causal"
        assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == torch.int32
        ends = given["cu_seq_q"].tolist()
        assert max(b - a for a, b in pairwise(ends)) == given["max_q"] == given["max_k"]
        parts = [
            scaled_dot_product_attention(
                *(given[name][a:b].transpose(0, 1) for name in ("query", "key", "value")),
                is_causal=True, scale=given["scale"], enable_gqa=True,
            ).transpose(0, 1)
            for a, b in pairwise(ends)
        ]  # fmt: skip
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", in_place)
    monkeypatch.setattr(attention, "_flash", lambda _: True)
    assert equal(found(*heads()), wanted(*heads()))
