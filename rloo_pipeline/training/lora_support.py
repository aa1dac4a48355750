"""Decides which LoRA adapters vLLM can serve, from the base's config.json and the section `lora`, without torch.

PEFT can put an adapter on any layer; vLLM serves only some layers, under its own names, and fails when it loads the
first adapter: in round 2, after round 1 has been paid for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.model_dims import experts_key, text_config
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from rloo_pipeline.config import Dtype, Lora

UNSUPPORTED = frozenset(
    {
        *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM"),
        *("DbrxForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM"),
        *("GPT2LMHeadModel", "GPTJForCausalLM", "Gemma3nForCausalLM", "HrmTextForCausalLM"),
        *("IQuestLoopCoderForCausalLM", "KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"),
        *("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "OrionForCausalLM", "StableLmForCausalLM"),
        *("Step1ForCausalLM", "Step3TextForCausalLM", "Step3p5ForCausalLM", "Zamba2ForCausalLM"),
    }
)
"""Architectures for which vLLM serves no adapter."""
RENAMED = {"Glm4ForCausalLM": {"gate_up_proj"}}
"""Modules that have other names in vLLM than in transformers, by architecture."""
ATTENTION_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
"""Modules whose adapters vLLM serves in models with experts."""

EXAMPLE = "[q_proj, k_proj, v_proj, o_proj]"


def check_lora(policy: Policy, lora: Lora | None) -> None:
    """Checks that vLLM can serve the adapter that a run would train.

    Args:
        policy: the full model.
        lora: the section `update.lora`.

    Raises:
        UserError: vLLM cannot serve it.
    """
    if lora is not None and (problem := _problem(policy.config, lora)):
        raise UserError(f"{policy.config_file}: {problem}")


def check_dtype_on_gpu(dtype: Dtype) -> None:
    """Checks the number format of a sampler that serves an adapter on a GPU.

    Raises:
        UserError: vLLM cannot sample in it.
    """
    if dtype == "float32":
        raise UserError(
            "model.dtype: float32 cannot be used with update.lora on a GPU, where vLLM computes adapters in 16 bits "
            "only; set model.dtype: bfloat16, or remove update.lora"
        )


def _problem(hf_config: Mapping[str, Any], lora: Lora) -> str | None:
    """The part that vLLM cannot serve, and advice; None if it serves the adapter."""
    kind = str(next(iter(hf_config.get("architectures") or ()), hf_config.get("model_type", "this model")))
    if kind in UNSUPPORTED:
        return f"vLLM serves no LoRA adapter of {kind}; remove update.lora, or use another model"
    renamed = RENAMED.get(kind, set())
    if lora.is_pattern:  # `policy_model.check_adapter` finds the names
        return None
    targets = renamed | {"all-linear"} if lora.target_modules == "all-linear" else set(lora.target_modules)
    if named := ", ".join(sorted(targets & renamed)):
        return (
            f"vLLM does not serve an adapter on {named} of {kind}; name the modules in update.lora.target_modules "
            f"without it, such as {EXAMPLE}"
        )
    experts, text = experts_key(hf_config), text_config(hf_config)
    if experts and (named := ", ".join(sorted(targets - ATTENTION_MODULES))):
        return (
            f"{kind} has experts ({experts}: {text[experts]}), and vLLM does not serve an adapter on {named} of it in "
            f"PEFT's format; name attention modules in update.lora.target_modules, such as {EXAMPLE}"
        )
    return None
