"""Reloads the weights of a vLLM engine, with the copies of them that vLLM's own reload leaves stale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.progress import say

if TYPE_CHECKING:
    from vllm import LLM


def reload_weights(llm: LLM, folder: Path) -> None:
    """Loads the full model in `folder` into an engine that holds another one of the same configuration.

    Raises:
        IncompatibleEngine: vLLM fails, or leaves experts out, as it does with those of gpt-oss.
    """
    llm.apply_model(_reset_packed_experts)
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.apply_model(_repack_lm_head)
    except Exception as error:  # of any kind: a new engine loads the policy in another way
        raise _refused(f"vLLM fails to load other weights into an engine ({error or type(error).__name__})") from error
    if not_loaded := [name for names in llm.apply_model(_experts_left_out) for name in names]:
        raise _refused(f"vLLM does not load experts such as {not_loaded[0]} into a running engine")


def _refused(why: str) -> IncompatibleEngine:
    say(f"{why}, so the policy gets a new engine")
    return IncompatibleEngine("weights of another policy that vLLM cannot replace")


def _reset_packed_experts(model: Any) -> None:
    """Makes a reload pack the weights of all experts: on CPUs vLLM packs only the first ones again, and would compute
    with the others as if they were packed.
    """
    if devices.device_type() == "cuda":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _experts_left_out(model: Any) -> list[str]:
    """Names of the layers of experts that `_reset_packed_experts` has reset and no reload has packed again."""
    methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    return [name for name, method in methods.items() if method and getattr(method, "moe_kernel", method) is None]


def _repack_lm_head(model: Any) -> None:
    """Renews the packed copy of the LM head, which may be the embedding itself; where it is tied, a reload leaves the
    old copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
