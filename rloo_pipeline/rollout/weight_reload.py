"""Reloads the weights of a vLLM engine, with the copies of them that vLLM's own reload leaves stale."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def reload_weights(llm: LLM, folder: Path) -> None:
    """Loads the full model in `folder` into an engine that holds another one of the same configuration."""
    llm.apply_model(_reset_packed_experts)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.apply_model(_repack_lm_head)


def _reset_packed_experts(model: Any) -> None:
    """Makes a reload pack the weights of all experts: on CPUs vLLM packs only the first ones again, and would compute
    with the others as if they were packed.
    """
    import torch

    if torch.cuda.is_available():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_lm_head(model: Any) -> None:
    """Renews the packed copy of the LM head, which may be the embedding itself; where it is tied, a reload leaves the
    old copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
