"""Replaces kernels of vLLM for CPUs that are wrong or missing.

They decide values, so the module belongs to the digest of rollouts, which leaves out `runtime/`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rloo_pipeline.runtime import guard

if TYPE_CHECKING:
    from torch import Tensor


def rotate_heads() -> None:
    """Makes vLLM on CPUs rotate queries [tokens, heads, size] in PyTorch: its kernel is right for queries
    [tokens, heads · size] and wrong for these, which latent attention (MLA) has.
    """
    base: Any = import_module("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbedding
    kernel = base.forward_cpu
    if kernel.__module__ == __name__:  # replaced in this process
        return
    guard.require_callable(base, "forward_cpu", "(self, positions, query, key)")

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (self.forward_native if query.dim() > 2 else partial(kernel, self))(positions, query, key)

    base.forward_cpu = forward_cpu


def leave_experts_to_cpus() -> None:
    """Makes vLLM choose its kernel of experts for CPUs under LoRA too, where it would choose that of Triton; an adapter
    must not be on the experts themselves.
    """
    module: Any = import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    select = module.select_unquantized_moe_backend
    if select.__module__ == __name__:  # replaced in this process
        return
    guard.require_callable(module, "select_unquantized_moe_backend", "(moe_config)")

    def select_unquantized_moe_backend(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    module.select_unquantized_moe_backend = select_unquantized_moe_backend
