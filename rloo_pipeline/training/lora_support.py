"""Which LoRA adapters vLLM serves, told from the base's config.json and the section `lora` alone: no weights, no torch.

PEFT puts an adapter on any layer, vLLM serves those that it knows under names that it knows, and finds out when it
loads the first one: in round 2, when round 1 has been paid for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from rloo_pipeline.config import Lora

WITHOUT = frozenset(
    {
        *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM"),
        *("DbrxForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM"),
        *("GPT2LMHeadModel", "GPTJForCausalLM", "Gemma3nForCausalLM", "HrmTextForCausalLM"),
        *("IQuestLoopCoderForCausalLM", "KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"),
        *("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "OrionForCausalLM", "StableLmForCausalLM"),
        *("Step1ForCausalLM", "Step3TextForCausalLM", "Step3p5ForCausalLM", "Zamba2ForCausalLM"),
    }
)
"""Architectures whose classes in vLLM serve no adapter."""
OTHERWISE = {"Glm4ForCausalLM": {"gate_up_proj"}}
"""Modules of some architectures that vLLM knows under other names than transformers."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Keys of config.json with the number of a layer's experts."""
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}
"""Modules of models with experts whose adapters vLLM serves as PEFT writes them."""

SUCH_AS = "[q_proj, k_proj, v_proj, o_proj]"


def refuse(config: Mapping[str, Any] | Path, lora: Lora | None) -> None:
    """Makes sure that vLLM serves the adapter that a run would train, as far as the base's config.json tells.

    Args:
        config: what is in config.json, or a folder with it.
        lora: the section `update.lora`.

    Raises:
        UserError: why it does not, and what to do.
    """
    if lora is None:
        return
    path = config / "config.json" if isinstance(config, Path) else Path("config.json")
    facts: Mapping[str, Any] = read_json(path) if isinstance(config, Path) else config
    if why := _why(facts, lora):
        raise UserError(f"{path}: {why}")


def _why(facts: Mapping[str, Any], lora: Lora) -> str | None:
    """What vLLM does not serve of an adapter, and what to do; None where it serves it."""
    kind = str(next(iter(facts.get("architectures") or ()), facts.get("model_type", "this model")))
    if kind in WITHOUT:
        return f"vLLM serves no LoRA adapter of {kind}; remove update.lora, or take another model"
    others = OTHERWISE.get(kind, set())
    targets = others | {"all-linear"} if lora.target_modules == "all-linear" else set(lora.target_modules)
    if named := ", ".join(sorted(targets & others)):
        return (
            f"vLLM does not serve an adapter on {named} of {kind}; name the modules in update.lora.target_modules "
            f"without it, such as {SUCH_AS}"
        )
    text = facts.get("text_config") or facts
    experts = next((key for key in EXPERTS if int(text.get(key) or 0) > 1), None)
    if experts and (named := ", ".join(sorted(targets - ATTENTION))):
        return (
            f"{kind} has experts ({experts}: {text[experts]}), and vLLM does not serve an adapter on {named} of it as "
            f"PEFT writes it; name modules of its attention in update.lora.target_modules, such as {SUCH_AS}"
        )
    return None
