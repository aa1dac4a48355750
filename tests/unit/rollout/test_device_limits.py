"""Models that vLLM cannot sample on this device are refused before an engine starts, with what to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import engine_arguments
from rloo_pipeline.rollout.engine_arguments import EngineSettings

MODEL = Policy(Path("model"))
DELTA = {"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 128}


def check(hf_config: dict[str, Any], dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "config", hf_config)
    engine_arguments.check_on_cpu(MODEL, dtype, None, router_replay=False)


@pytest.mark.parametrize(
    ("hf_config", "dtype", "reason"),
    [
        (DELTA, "float32", "in bfloat16 only, not float32; set model.dtype: bfloat16"),
        ({"text_config": DELTA}, "float16", "in bfloat16 only, not float16"),
        (
            {**DELTA, "linear_value_head_dim": 96},
            "bfloat16",
            "64 or 128 dimensions, and linear_value_head_dim is 96",
        ),
        ({"num_experts": 4, "hidden_size": 40}, "float32", "hidden_size is 40; use another"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "hidden_size": 64, "intermediate_size": 24},
            "float32",
            "intermediate_size is 24",
        ),
    ],
)
def test_a_model_is_refused_by_its_config_json(hf_config, dtype, reason, monkeypatch) -> None:
    with pytest.raises(UserError, match=f"^model/config.json: vLLM on CPUs .*{reason}"):
        check(hf_config, dtype, monkeypatch)


@pytest.mark.parametrize(
    "hf_config",
    [
        DELTA,
        {"num_experts": 4, "hidden_size": 64, "intermediate_size": 24, "moe_intermediate_size": 24},
        {"num_experts": 1, "hidden_size": 40},
        {"hidden_size": 40},
    ],
)
def test_other_models_are_taken(hf_config, monkeypatch) -> None:
    check(hf_config, "bfloat16", monkeypatch)


def engine(size: int, latent: bool = False, without: bool = False) -> SimpleNamespace:
    return SimpleNamespace(get_head_size=lambda: size, use_mla=latent, is_attention_free=without)


def test_heads_of_other_sizes_are_refused() -> None:
    for model in (engine(64), engine(576, latent=True), engine(48, without=True)):
        engine_arguments.check_heads(MODEL, model)
    with pytest.raises(UserError, match=r"attention heads of 32, 64, .* dimensions, not 48; use another model"):
        engine_arguments.check_heads(MODEL, engine(48))
    with pytest.raises(UserError, match=r"kv_lora_rank and qk_rope_head_dim add up to 576, not 320; use another"):
        engine_arguments.check_heads(MODEL, engine(320, latent=True))


def test_batch_invariant_sampling_on_a_gpu_is_refused_where_vllm_lacks_it(monkeypatch) -> None:
    monkeypatch.setattr(Policy, "config", {"head_dim": 64})
    engine_arguments.check_invariant(MODEL, "fp8_per_tensor")
    monkeypatch.setattr(Policy, "config", {"num_experts": 4})
    engine_arguments.check_invariant(MODEL, "fp8_per_channel")
    with pytest.raises(UserError, match="so completions depend on the batch"):
        engine_arguments.check_invariant(MODEL, "fp8_per_tensor")
    monkeypatch.setattr(Policy, "config", DELTA)
    with pytest.raises(UserError, match="no batch-invariant kernels for the model's recurrent layers"):
        engine_arguments.check_invariant(MODEL, None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(engine_arguments.devices, "device_type", lambda: "cuda")
    with pytest.raises(UserError, match="set reproducible: false"):
        engine_arguments.arguments(MODEL, EngineSettings("bfloat16", 0.9, 1, 1), 10, 0)
