"""An adapter that vLLM cannot serve is an error, decided from config.json and the section `lora`."""

import json
import os

import forks
import pytest
from helpers import mini, succeeded

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config, Lora
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support
from rloo_pipeline.training.model_support import check_run

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
GLM4 = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
ATTENTION = Lora(target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (QWEN3, Lora()),
        (QWEN3, ATTENTION),
        (EXPERTS, ATTENTION),
        (MIXTRAL, ATTENTION),
        ({**EXPERTS, "num_experts": 0}, Lora()),
        (GLM4, Lora(target_modules=["q_proj", "down_proj"])),
        ({"architectures": ["GPT2LMHeadModel"]}, None),
    ],
)
def test_what_vllm_serves_passes(config, lora, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_support.check_lora(Policy(tmp_path), lora)


@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, Lora(), "no LoRA adapters for GPT2LMHeadModel; remove update.lora"),
        ({"architectures": ["StableLmForCausalLM"]}, ATTENTION, "StableLmForCausalLM"),
        (GLM4, Lora(), r"an adapter on gate_up_proj of Glm4ForCausalLM; .* without it"),
        (GLM4, Lora(target_modules=["gate_up_proj"]), "gate_up_proj"),
        (EXPERTS, Lora(), r"num_experts: 128.*all-linear.*target_modules.*q_proj"),
        (MIXTRAL, Lora(target_modules=["q_proj", "gate"]), r"an adapter on its gate"),
        ({"text_config": EXPERTS, "architectures": ["X"]}, Lora(), "X has experts"),
    ],
)
def test_what_vllm_does_not_serve_is_an_error(config, lora, message, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        model_support.check_lora(Policy(tmp_path), lora)


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_vllm(tmp_path) -> None:
    """Of architectures whose modules can be imported here."""
    code = """
import importlib
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_lora
for name in ("BloomForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "StableLmForCausalLM",
             "Qwen3ForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "Glm4ForCausalLM"):
    module, kind = registry._TEXT_GENERATION_MODELS[name]
    architecture = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
    print("is", name, supports_lora(architecture))
"""
    (tmp_path / "serves.py").write_text(code)
    output = succeeded(forks.run(tmp_path / "serves.py", [], os.environ)).stdout
    supported = {line.split()[1]: line.split()[2] == "True" for line in output.splitlines() if line.startswith("is ")}
    assert supported == {name: name not in model_support.WITHOUT_LORA for name in supported}
    assert len(supported) == 10


@pytest.mark.parametrize("stage", ["stage-assets", "warmstart"])
def test_the_first_stages_refuse_it(tmp_path, stage) -> None:
    """By what they are given of the configuration."""
    (tmp_path / "config.json").write_text(json.dumps({**EXPERTS, "num_attention_heads": 2, "hidden_size": 64}))
    with pytest.raises(UserError, match="has experts"):
        check_run(Config(**mini(update={"lora": {}})).only(stage), Policy(tmp_path))
    check_run(Config(**mini()).only(stage), Policy(tmp_path))
