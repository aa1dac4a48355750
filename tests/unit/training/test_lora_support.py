"""An adapter that vLLM cannot serve is an error, decided from config.json and the section `lora`."""

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
BAILING = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe"}
INTERNLM = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
ATTENTION = Lora(target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (QWEN3, Lora()),
        (QWEN3, ATTENTION),
        (EXPERTS, ATTENTION),
        (MIXTRAL, ATTENTION),
        (EXPERTS, Lora(target_modules=["self_attn.q_proj", "layers.1.self_attn.v_proj"])),
        ({**EXPERTS, "num_experts": 0}, Lora()),
        (GLM4, Lora(target_modules=["q_proj", "down_proj"])),
        (QWEN3, Lora(target_modules=["embed_tokens", "lm_head"])),
        ({"architectures": ["Olmo2ForCausalLM"]}, Lora(target_modules=["embed_tokens"])),
        ({"architectures": ["ExaoneForCausalLM"]}, Lora(target_modules=["wte", "lm_head"])),
        (GLM4, Lora(target_modules=["self_attn.o_proj"])),
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
        (GLM4, Lora(target_modules=["mlp.gate_up_proj"]), r"on mlp\.gate_up_proj of Glm4ForCausalLM; .* without it"),
        (
            MISTRAL,
            Lora(target_modules=["model.embed_tokens", "lm_head"]),
            r"lm_head, model\.embed_tokens .* without them",
        ),
        (BAILING, Lora(target_modules=["word_embeddings"]), "an adapter on word_embeddings"),
        (
            INTERNLM,
            Lora(target_modules=["wqkv", "tok_embeddings", "output"]),
            "an adapter on output, tok_embeddings of",
        ),
        ({"architectures": ["ExaoneForCausalLM"]}, Lora(target_modules=["embed_tokens"]), "an adapter on embed_tokens"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, Lora(), "no LoRA adapters for Gemma3n"),
        (MISTRAL, Lora(target_modules=["q_proj", "lm_head"]), "an adapter on lm_head of MistralForCausalLM"),
        (MISTRAL, Lora(target_modules=["q_proj", "embed_tokens"]), "an adapter on embed_tokens of Mistral"),
        ({"architectures": ["CohereForCausalLM"]}, Lora(target_modules=["embed_tokens", "lm_head"]), "on lm_head of C"),
        ({"architectures": ["GPTNeoXForCausalLM"]}, Lora(target_modules=["embed_in"]), "an adapter on embed_in"),
        (EXPERTS, Lora(), r"num_experts: 128.*all-linear.*target_modules.*q_proj"),
        (MIXTRAL, Lora(target_modules=["q_proj", "gate"]), r"an adapter on its gate in"),
        (EXPERTS, Lora(target_modules=["self_attn.q_proj", "mlp.gate"]), r"an adapter on its mlp\.gate in"),
        ({"text_config": EXPERTS, "architectures": ["X"]}, Lora(), "X has experts"),
    ],
)
def test_what_vllm_does_not_serve_is_an_error(config, lora, message, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        model_support.check_lora(Policy(tmp_path), lora)


PACKAGE = importlib.util.find_spec("vllm")
assert PACKAGE is not None
assert PACKAGE.origin is not None
MODELS = Path(PACKAGE.origin).parent / "model_executor" / "models"
LISTED = {row["name"] for row in model_support.LISTS if row["list"] != "encoders"}
OTHERS = {"CohereForCausalLM", "Cohere2ForCausalLM"}
"""Architectures in no list, of which vLLM serves adapters on the embedding but not on the LM head."""
BY_PLATFORM = {"DeepseekV4ForCausalLM", "KimiLinearForCausalLM"}
"""Architectures for which vLLM has a class per platform."""


class Served(NamedTuple):
    """Adapters that a class of vLLM can serve."""

    adapters: bool
    embeddings: str | None
    """The source of `embedding_modules`; None if the class has none of its own."""


@cache
def classes_of(file: Path) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[str, str]]]:
    """The classes of a module of vLLM, and the modules and names of its imports."""
    body = ast.parse(file.read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    names = {each.asname or each.name: (str(node.module), each.name) for node in imports for each in node.names}
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}, names


def served(module: str, name: str) -> Served:
    """By the source, with what the class inherits; importing vLLM's models takes 20 s."""
    classes, imported = classes_of(MODELS / f"{module}.py")
    bases = [ast.unparse(base).partition("[")[0] for base in classes[name].bases]
    own = [ast.unparse(node) for node in classes[name].body if ast.unparse(node).startswith("embedding_modules")]
    inherited = []
    for base in bases:
        place, origin = imported.get(base, (module, base))
        place = place.removeprefix("vllm.model_executor.models.")
        if (MODELS / f"{place}.py").exists() and origin in classes_of(MODELS / f"{place}.py")[0]:
            inherited.append(served(place, origin))
    embeddings = [*own, *(each.embeddings for each in inherited if each.embeddings is not None)]
    return Served("SupportsLoRA" in bases or any(each.adapters for each in inherited), next(iter(embeddings), None))


@pytest.mark.parametrize("name", sorted((LISTED | OTHERS) - BY_PLATFORM))
def test_the_lists_are_those_of_the_installed_vllm(name) -> None:
    found = re.search(rf'"{name}": \(\s*"(\w+)",\s*"(\w+)",?\s*\)', (MODELS / "registry.py").read_text())
    assert found is not None
    of_vllm = served(found[1], found[2])
    assert of_vllm.adapters == (name not in model_support.WITHOUT_LORA)
    if of_vllm.adapters:
        embedding = model_support.EMBEDDING_NAMES.get(name, "embed_tokens")
        embeddings = of_vllm.embeddings or ""
        assert ("lm_head" in embeddings) == (name in model_support.LM_HEAD)
        assert (f"'{embedding}'" in embeddings) == (name not in model_support.WITHOUT_EMBEDDING)


@pytest.mark.parametrize("stage", ["stage-assets", "warmstart"])
def test_the_first_stages_refuse_it(tmp_path, stage) -> None:
    """By what they are given of the configuration."""
    (tmp_path / "config.json").write_text(json.dumps({**EXPERTS, "num_attention_heads": 2, "hidden_size": 64}))
    with pytest.raises(UserError, match="has experts"):
        check_run(Config(**mini(update={"lora": {}})).only(stage), Policy(tmp_path))
    check_run(Config(**mini()).only(stage), Policy(tmp_path))
