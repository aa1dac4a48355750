"""vLLM's share of a GPU and its cache on CPUs, computed before its engine starts."""

import json
from pathlib import Path

import pytest
from helpers import mini

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import engine_arguments, lm_eval_model
from rloo_pipeline.rollout.engine_arguments import (
    CPU_BLOCK_SIZE,
    CPU_MAX_SEQS,
    EngineSettings,
    VisibleGpu,
    cache_bytes,
    gpu_arguments,
    gpu_budget,
)
from rloo_pipeline.runtime import devices

GIB = 2**30
H200, A10 = VisibleGpu(139.8 * GIB, "NVIDIA H200"), VisibleGpu(22.5 * GIB, "NVIDIA A10")
QWEN_1_7B = ModelDims(2048, 28, 2048, 1024, 6144, 151936, 1_720_000_000)
QWEN_7B = ModelDims(3584, 28, 3584, 512, 18944, 152064, 7_600_000_000)
TINY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 30,
}

LONGROPE = {
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 100},
}


def engine(share: float, parallel: int = 1, quantization: str | None = None) -> EngineSettings:
    return EngineSettings("bfloat16", share, 1, parallel, quantization=quantization)


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    monkeypatch.delenv(devices.WARM, raising=False)


@pytest.mark.parametrize(
    ("dims", "card", "share"), [(QWEN_1_7B, H200, 0.35), (QWEN_7B, H200, 0.9), (QWEN_7B, A10, 0.95)]
)
def test_a_large_model_fills_the_share_that_it_may_have_and_no_more(dims, card, share) -> None:
    budget = gpu_budget(dims, engine(share), card, 16384)
    assert budget.total == pytest.approx(share * card.memory)
    assert budget.cache > dims.cached("bfloat16") * 1024


def test_a_small_model_gets_what_a_full_batch_takes(tmp_path) -> None:
    """So several engines find room on one GPU, each without a look at the others."""
    small = QWEN_1_7B._replace(layers=2, key_value=64)
    budget = gpu_budget(small, engine(0.9), H200, 100)
    assert budget.cache == H200.sequences * 128 * small.cached("bfloat16") * 5 / 4
    assert gpu_budget(small, engine(0.9), H200, 100, recurrent=True).total == pytest.approx(0.9 * H200.memory)


def test_quantized_weights_leave_more_of_a_gpu_to_the_cache() -> None:
    """7.6 billion weights, of which 1.09 in embeddings and head."""
    plain, quantized = (
        gpu_budget(QWEN_7B, engine(0.95, quantization=each), A10, 2048) for each in (None, "fp8_per_tensor")
    )
    assert plain.weights - quantized.weights == pytest.approx(7.6e9 - 2 * 152064 * 3584)
    assert quantized.cache - plain.cache == pytest.approx(plain.weights - quantized.weights, abs=1)


def test_warm_engines_on_the_same_gpu_leave_less(monkeypatch) -> None:
    alone = gpu_budget(QWEN_7B, engine(1.0), A10, 2048)
    monkeypatch.setenv(devices.WARM, "logprobs sampler trainer")
    beside = gpu_budget(QWEN_7B, engine(1.0), A10, 2048)
    assert alone.cache - beside.cache == pytest.approx(2e9, abs=1)
    of_harness = gpu_budget(QWEN_7B, engine(1.0), A10, 2048, kept=False)
    assert alone.cache - of_harness.cache == pytest.approx(4.5e9, abs=1)


def test_the_batch_is_that_of_vllm_for_the_card() -> None:
    """EngineArgs.get_batch_defaults for LLM: A100s have the smaller one."""
    assert (H200.sequences, H200.tokens) == (1024, 16384)
    assert (A10.sequences, A10.tokens) == (256, 8192)
    assert VisibleGpu(79 * GIB, "NVIDIA A100-SXM4-80GB").sequences == 256


def written(folder: Path, **keys: object) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | keys))
    return folder


def test_vllm_is_told_bytes_and_demands_what_it_will_use(tmp_path) -> None:
    settings = gpu_arguments(Policy(written(tmp_path)), engine(0.9), H200, 128)
    assert settings["max_num_seqs"] == 1024
    assert settings["kv_cache_memory_bytes"] == 1024 * 128 * (2 * 2 * 32 * 2) * 5 // 4
    assert settings["gpu_memory_utilization"] * H200.memory > engine_arguments.devices.IDLE["sampler"]
    assert settings["gpu_memory_utilization"] < 0.03


def test_a_batch_is_as_large_as_the_slice_of_a_gpu_allows_and_not_the_whole(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    name, policy = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", Policy(tmp_path)
    cards = [VisibleGpu(gib * 2**30, name) for gib in (9.5, 79)]
    given = [gpu_arguments(policy, engine(0.9), card, 128)["max_num_batched_tokens"] for card in cards]
    given.append(gpu_arguments(policy, engine(0.9), cards[0], 16)["max_num_batched_tokens"])
    assert given == [8192, 16384, 256 * 16]


def test_a_model_whose_sizes_are_unknown_is_measured_by_vllm(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    of_slice = VisibleGpu(9.5 * GIB, "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    given = gpu_arguments(Policy(tmp_path), engine(0.8), of_slice, 128)
    assert given == {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.8}


def test_a_cache_that_holds_no_sequence_is_refused_with_the_keys(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Policy, "dimensions", QWEN_7B)
    with pytest.raises(
        UserError, match=r"^vllm.gpu_memory_utilization: 0.7 of a GPU of 24.2 GB is too little: the weig"
    ):
        gpu_arguments(Policy(written(tmp_path)), engine(0.7), A10, 4096)
    assert gpu_arguments(Policy(written(tmp_path)), engine(0.7, 2), A10, 4096)["kv_cache_memory_bytes"] > 0


def test_the_cache_is_as_large_as_the_sequences_at_once_need() -> None:
    shape = ModelDims(hidden=64, layers=2, heads=64, key_value=32, intermediate=128, vocabulary=100, parameters=0)
    assert shape.cached("float32") == 2 * 2 * 32 * 4
    of_cpus = EngineSettings("float32", 0.9, 1, 1)
    needed = CPU_MAX_SEQS * 2 * CPU_BLOCK_SIZE * shape.cached("float32")
    assert needed < cache_bytes(shape, of_cpus, CPU_BLOCK_SIZE + 1) < 2 * needed
    assert cache_bytes(shape, of_cpus, 10**6) == 2**30, "no more than the configuration gives it"
    assert cache_bytes(None, of_cpus._replace(kv_cache_gib=3), 100) == 3 * 2**30


def test_the_engine_of_lm_eval_has_its_share_of_a_gpu(tmp_path, monkeypatch) -> None:
    """With the sections that its stage gets."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(engine_arguments, "visible_gpu", lambda _: H200)
    evaluation = {"harness": {"tasks": ["arc_easy"], "max_model_len": 512}}
    config = Config(**mini(evaluation=evaluation)).only("harness")
    given = lm_eval_model.arguments(config, config.evaluation.harness, Policy(tmp_path))
    assert given["kv_cache_memory_bytes"] > 0
    assert given["gpu_memory_utilization"] < config.vllm.gpu_memory_utilization
    assert not given["enforce_eager"]


@pytest.mark.parametrize(
    ("keys", "needed", "context"),
    [
        ({}, 90, 128),
        ({"max_position_embeddings": 100}, 90, 100),
        (LONGROPE, 90, 100),
        (LONGROPE, 30, 64),
        (LONGROPE, 101, 101),
    ],
)
def test_a_context_is_rounded_up_unless_vllm_would_use_another_rotary_embedding(
    tmp_path, keys, needed, context
) -> None:
    assert engine_arguments.context_length(Policy(written(tmp_path, **keys)), needed) == context
