"""Attention over sequences laid out side by side: every kernel gives what each sequence alone would."""

import inspect
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from rloo_pipeline.errors import UserError
from rloo_pipeline.training.kernels import attention, short_attention
from rloo_pipeline.training.kernels.short_attention import Local
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
attention.register()
LAYOUT = lay_out(*(torch.tensor(values) for values in (FIRST, PROMPTS, OWN, COMPLETIONS)))


def heads(of_values: int = 8) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, of_values))
    return [torch.randn(1, count, TOKENS, size, generator=draw).requires_grad_() for count, size in sizes]


def weighted(out: torch.Tensor) -> torch.Tensor:
    return (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum()


def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    arguments = {"attention_mask": None, "layout": LAYOUT, **options}
    out, _ = attention.packed_attention(torch.nn.Module(), query, key, value, **arguments)
    return out, *torch.autograd.grad(weighted(out), (query, key, value))


def causal(*sequence: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(*sequence, is_causal=True, enable_gqa=True)


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend=causal) -> tuple[torch.Tensor, ...]:
    """The same, one sequence at a time; the output of a shared token is that of its first sequence."""
    out: dict[int, torch.Tensor] = {}
    for places in SEQUENCES:
        output = attend(*(tensor[:, :, places] for tensor in (query, key, value)))
        for number, place in enumerate(places):
            out.setdefault(place, output[0, :, number])
    outputs = torch.stack([out[place] for place in range(TOKENS)]).unsqueeze(0)
    return outputs, *torch.autograd.grad(weighted(outputs), (query, key, value))


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
    copies = [part.tolist() for part in index.copies.tensor_split(index.starts[1:].long())]
    places = [[place for place, entry in enumerate(index.sources.tolist()) if entry == of] for of in range(60)]
    assert copies[2:] == places[2:], "padding is laid out as the first token"
    assert [len(each) for each in copies[:2]] == [4, 4]
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


def described(size: int, chunked: bool = False, length: int = 60, **rules) -> torch.Tensor | None:
    """What layers get for a mask of transformers."""
    config = LlamaConfig(sliding_window=size, attention_chunk_size=size, attn_implementation=attention.NAME)
    create = create_chunked_causal_mask if chunked else create_sliding_window_causal_mask
    positions = torch.arange(length)[None]
    return create(config, torch.zeros(1, length, 8), torch.ones(1, length), None, position_ids=positions, **rules)


def eager_with(size: int | None = None, chunked: bool = False, softcap: float | None = None, s_aux=None):
    """Attention of one sequence by transformers' own functions."""
    config = LlamaConfig(sliding_window=size, attention_chunk_size=size, attn_implementation="eager")
    create = create_chunked_causal_mask if chunked else create_sliding_window_causal_mask

    def attend(query, key, value):
        length, module = query.shape[2], torch.nn.Module()
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        if size is not None:
            mask = create(config, torch.zeros(1, length, 8), None, None)
        module.num_key_value_groups, module.training, module.sinks = 2, False, s_aux
        if s_aux is not None:
            out, _ = modeling_gpt_oss.eager_attention_forward(module, query, key, value, mask, 8**-0.5)
        else:
            out, _ = modeling_gemma2.eager_attention_forward(module, query, key, value, mask, 0.0, 8**-0.5, softcap)
        return out.transpose(1, 2)

    return attend


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("short", [128, 10, 0])
@pytest.mark.parametrize("size", [2, 5, 38])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_window_or_chunk_is_that_of_each_sequence_alone(chunked, size, short, monkeypatch) -> None:
    monkeypatch.setattr(attention, "SHORT", short)
    expected = one_by_one(*heads(), eager_with(size, chunked))
    assert not equal(packed(*heads()), expected)
    assert equal(packed(*heads(), attention_mask=described(size, chunked)), expected)


def test_a_row_shorter_than_its_window_is_described_although_the_mask_looks_its_tokens_up() -> None:
    """Gemma 4 Unified looks up the image that each token is a part of (-1: of none)."""
    mask = described(8, length=2, block_sequence_ids=torch.full((1, 2), -1))
    assert getattr(mask, attention.DESCRIPTION) == Local(8, chunked=False)


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("scores", [{"softcap": 0.7}, {"s_aux": SINKS}], ids=["soft cap", "sinks"])
def test_soft_caps_and_sinks_are_those_of_transformers(scores, size) -> None:
    mask = None if size is None else described(size)
    assert not equal(packed(*heads(), attention_mask=mask), one_by_one(*heads(), eager_with(size, **scores)))
    assert equal(packed(*heads(), attention_mask=mask, **scores), one_by_one(*heads(), eager_with(size, **scores)))


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_window_that_no_row_exceeds_is_none(shorter, monkeypatch) -> None:
    windows = list[object]()
    by_block = attention._by_block
    monkeypatch.setattr(attention, "_by_block", lambda *args: windows.append(args[2].local) or by_block(*args))
    size = len(LAYOUT.first_copy) - shorter
    packed(*heads(), attention_mask=described(size))
    assert windows == [Local(size, chunked=False) if shorter else None]


UNSUPPORTED = {
    "bias": {"position_bias": torch.zeros(1)},
    "not causal": {"is_causal": False},
    "its own attention mask": {"attention_mask": torch.zeros(1)},
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_any_other_mask_raises(feature) -> None:
    arguments = {"attention_mask": None, "layout": LAYOUT, **UNSUPPORTED[feature]}
    with pytest.raises(UserError, match=f"Module asks for .*{feature}"):
        attention.packed_attention(torch.nn.Module(), *heads(), **arguments)


def test_a_rule_of_the_models_own_has_no_description() -> None:
    config = LlamaConfig(attn_implementation=attention.NAME)
    rule = lambda batch, head, query, key: key != 3  # noqa: E731
    mask = create_causal_mask(config, torch.zeros(1, 60, 8), torch.ones(1, 60), None, and_mask_function=rule)
    with pytest.raises(UserError, match="its own attention mask"):
        packed(*heads(), attention_mask=mask)


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


@pytest.mark.parametrize("window", [None, 5])
def test_varlen_attention_is_called_by_its_signature(window, monkeypatch) -> None:
    """Without a GPU: a stand-in does what varlen_attn is documented to do, with arguments bound to its signature."""
    signature, attend = inspect.signature(varlen.varlen_attn), causal if window is None else eager_with(window)

    def stand_in(*args, **keywords):
        bound = signature.bind(*args, **keywords).arguments
        assert bound["enable_gqa"]
        assert bound["window_size"] == (-1 if window is None else window - 1, 0), "which is causal"
        assert bound["cu_seq_q"].dtype == bound["cu_seq_k"].dtype == torch.int32
        ends = bound["cu_seq_q"].tolist()
        assert max(b - a for a, b in pairwise(ends)) == bound["max_q"] == bound["max_k"]
        parts = [
            attend(*(bound[name][a:b].transpose(0, 1)[None] for name in ("query", "key", "value")))[0].transpose(0, 1)
            for a, b in pairwise(ends)
        ]
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "_supports_flash", lambda *_: True)
    mask = None if window is None else described(window)
    assert equal(packed(*heads(), attention_mask=mask), one_by_one(*heads(), attend))
