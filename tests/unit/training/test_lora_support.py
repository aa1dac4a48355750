"""An adapter that vLLM cannot serve is an error, decided from config.json and the section `lora`."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from helpers import mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config, Lora
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support
from rloo_pipeline.training.model_support import check_run

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
GLM4 = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
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
        (QWEN3, Lora(target_modules=["embed_tokens", "lm_head"])),
        ({"architectures": ["Olmo2ForCausalLM"]}, Lora(target_modules=["embed_tokens"])),
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
        (MISTRAL, Lora(target_modules=["q_proj", "lm_head"]), "an adapter on lm_head of MistralForCausalLM"),
        (MISTRAL, Lora(target_modules=["q_proj", "embed_tokens"]), "an adapter on embed_tokens of Mistral"),
        ({"architectures": ["CohereForCausalLM"]}, Lora(target_modules=["embed_tokens", "lm_head"]), "on lm_head of C"),
        ({"architectures": ["GPTNeoXForCausalLM"]}, Lora(target_modules=["embed_in"]), "an adapter on embed_in"),
        (EXPERTS, Lora(), r"num_experts: 128.*all-linear.*target_modules.*q_proj"),
        (MIXTRAL, Lora(target_modules=["q_proj", "gate"]), r"an adapter on its gate"),
        ({"text_config": EXPERTS, "architectures": ["X"]}, Lora(), "X has experts"),
    ],
)
def test_what_vllm_does_not_serve_is_an_error(config, lora, message, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        model_support.check_lora(Policy(tmp_path), lora)


NAMES = (
    *("BloomForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "StableLmForCausalLM"),
    *("Qwen3ForCausalLM", "LlamaForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "Glm4ForCausalLM"),
    *("Qwen2ForCausalLM", "GemmaForCausalLM", "Gemma3ForCausalLM", "CohereForCausalLM"),
)


@pytest.mark.parametrize("name", NAMES)
def test_the_list_is_that_of_the_installed_vllm(name) -> None:
    """By the source of vLLM, of architectures whose classes name all their bases; importing them takes 20 s."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    models = Path(package.origin).parent / "model_executor" / "models"
    found = re.search(rf'"{name}": \("(\w+)", "(\w+)"\)', (models / "registry.py").read_text())
    assert found is not None
    module = ast.parse((models / f"{found[1]}.py").read_text())
    [kind] = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == found[2]]
    assert ("SupportsLoRA" in map(ast.unparse, kind.bases)) == (name not in model_support.WITHOUT_LORA)
    if name not in model_support.WITHOUT_LORA:
        embeddings = "".join(ast.unparse(node) for node in kind.body if "embedding_modules" in ast.unparse(node)[:17])
        assert ("lm_head" in embeddings) == (name in model_support.LM_HEAD)
        assert ("embed_tokens" in embeddings) == (name not in model_support.WITHOUT_EMBEDDING)


@pytest.mark.parametrize("stage", ["stage-assets", "warmstart"])
def test_the_first_stages_refuse_it(tmp_path, stage) -> None:
    """By what they are given of the configuration."""
    (tmp_path / "config.json").write_text(json.dumps({**EXPERTS, "num_attention_heads": 2, "hidden_size": 64}))
    with pytest.raises(UserError, match="has experts"):
        check_run(Config(**mini(update={"lora": {}})).only(stage), Policy(tmp_path))
    check_run(Config(**mini()).only(stage), Policy(tmp_path))
