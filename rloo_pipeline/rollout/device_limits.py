"""Refuses what vLLM cannot sample on this device; vLLM itself fails deep inside an engine, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices

if TYPE_CHECKING:
    from vllm.config import ModelConfig

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's kernel for CPUs is compiled for."""
LATENT = 576
"""The size of latent attention (kv_lora_rank and qk_rope_head_dim together) that it is compiled for."""
QUANTIZATION = "fp8_per_channel"
"""The scheme of `rollout.quantization` that it has layers for, which are those of PyTorch."""
DELTA_HEADS = (64, 128)
"""Sizes of a head of DeltaNet that it is compiled for."""
MULTIPLE = 32
"""The hidden size of a model with experts must be a multiple of this. vLLM pads the width of experts, except in
gpt-oss.
"""


def check(policy: Policy, dtype: Dtype, quantization: str | None) -> None:
    """Checks a policy by its config.json before its engine starts.

    Args:
        policy: the policy.
        dtype: number format of the sampler.
        quantization: the scheme of `rollout.quantization`, if any.

    Raises:
        UserError: vLLM cannot sample it on this device.
    """
    if devices.device_type() == "cuda":
        check_on_gpu(dtype, policy.is_adapter)
    else:
        check_on_cpu(policy, dtype, quantization)


def check_on_gpu(dtype: Dtype, has_adapter: bool) -> None:
    """Checks a sampler on a GPU, with or without a LoRA adapter.

    Raises:
        UserError: vLLM cannot sample like this.
    """
    if has_adapter and dtype == "float32":
        raise UserError(
            "model.dtype: float32 cannot be used with update.lora on a GPU, where vLLM computes adapters in 16 bits "
            "only; set model.dtype: bfloat16, or remove update.lora"
        )


def check_on_cpu(policy: Policy, dtype: Dtype, quantization: str | None) -> None:
    """As `check`, on CPUs."""
    if quantization not in (None, QUANTIZATION):
        raise UserError(
            f"rollout.quantization: {quantization} needs a GPU; vLLM on CPUs has {QUANTIZATION}, or leave it out"
        )
    text = policy.text_config
    if text.get("linear_num_value_heads"):
        _check_delta_net(policy.config_file, text, dtype)
    if policy.has_experts:
        _check_experts(policy.config_file, text)


def _check_delta_net(file: Path, text: Mapping[str, Any], dtype: Dtype) -> None:
    if dtype != "bfloat16":
        raise UserError(
            f"{file}: vLLM on CPUs computes DeltaNet layers (linear_num_value_heads) in bfloat16 only, not {dtype}; "
            "set model.dtype: bfloat16, or sample on a GPU"
        )
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if text.get(key) not in {*DELTA_HEADS, None}:
            raise UserError(
                f"{file}: vLLM on CPUs computes DeltaNet layers whose heads have {' or '.join(map(str, DELTA_HEADS))} "
                f"dimensions, and {key} is {text[key]}; use another model, or sample on a GPU"
            )


def _check_experts(file: Path, text: Mapping[str, Any]) -> None:
    for key in ("hidden_size", *(["intermediate_size"] if text.get("model_type") == "gpt_oss" else [])):
        if int(text.get(key) or 0) % MULTIPLE:
            raise UserError(
                f"{file}: vLLM on CPUs computes experts of sizes that are multiples of {MULTIPLE}, and {key} is "
                f"{text[key]}; use another model, or sample on a GPU"
            )


def check_heads(policy: Policy, model: ModelConfig) -> None:
    """Checks the attention of a model as a started engine has read it.

    Raises:
        UserError: vLLM cannot compute it on a CPU.
    """
    if model.use_mla or not model.is_attention_free:
        _check_head(policy.config_file, model.get_head_size(), model.use_mla)


def check_configured_heads(policy: Policy) -> None:
    """Applies `check_heads` to config.json, without an engine; skips models whose config.json does not give the heads.

    Raises:
        UserError: vLLM cannot compute these heads on a CPU.
    """
    text = policy.text_config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    size = text.get("head_dim") or (hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else None)
    if isinstance(size, int) and not text.get("kv_lora_rank") and not policy.is_recurrent:
        _check_head(policy.config_file, size, latent=False)


def _check_head(file: Path, size: int, latent: bool) -> None:
    if latent and size != LATENT:
        raise UserError(
            f"{file}: vLLM on CPUs computes latent attention in which kv_lora_rank and qk_rope_head_dim make {LATENT} "
            f"together, not {size}; use another model, or sample on a GPU"
        )
    if not latent and size not in HEADS:
        raise UserError(
            f"{file}: vLLM on CPUs computes attention heads of {', '.join(map(str, HEADS))} dimensions, not {size}; "
            "use another model, or sample on a GPU"
        )
