"""Models that leave a GPU to another stage. On a CPU both places are host memory."""

import gc
import weakref

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.training import forward_only, host_copies
from rloo_pipeline.training.host_copies import HostCopies
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SEQUENCES = Sequences([[1, 2, 3], [4, 5]], [[6, 7], [8]])


def model() -> TokenLogProbs:
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    config._attn_implementation = attention.NAME
    return TokenLogProbs(Qwen3ForCausalLM(config).requires_grad_(False).eval(), 1.0)


def logps_of(logprobs: TokenLogProbs) -> list[list[float]]:
    return forward_only.score(logprobs, SEQUENCES, 64, "test").logps


def test_a_model_that_left_and_returned_computes_the_same(monkeypatch) -> None:
    logprobs = model()
    before = logps_of(logprobs)
    for _ in range(2):
        logprobs.offload()
        logprobs.offload()
        assert not any(weights.untyped_storage().nbytes() for weights in logprobs.parameters())
        logprobs.enter_gpu()
        logprobs.enter_gpu()
        assert logps_of(logprobs) == before
        monkeypatch.setattr(host_copies, "_pinned", None)  # the second time takes the memory of the first


@pytest.mark.parametrize("constant", [False, True])
def test_only_what_changes_is_copied_again(constant) -> None:
    copies, weights = HostCopies(), torch.ones(4)
    views = [weights, weights[2:]]
    copies.take(views, constant)()
    weights.fill_(2.0)
    restore = copies.take(views, constant)
    assert torch.equal(copies.of({"moments": weights})["moments"], torch.full((4,), 1.0 if constant else 2.0))
    restore()
    assert torch.equal(views[1], torch.full((2,), 1.0 if constant else 2.0))


def test_where_memory_cannot_be_pinned_copies_are_pageable(monkeypatch, caplog) -> None:
    def refuse(*_, **__) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refuse)
    with caplog.at_level("INFO"):
        assert host_copies._pinned(8).nbytes() == 8
    assert "cannot be pinned, so copies are slower (CUDA error: out of memory)" in caplog.text


def test_a_model_that_is_not_kept_frees_its_memory() -> None:
    """The stages that load several, one after the other, delete each and collect."""
    logprobs = model()
    logps_of(logprobs)
    alive = weakref.ref(next(logprobs.parameters()))
    del logprobs
    gc.collect()
    assert alive() is None
