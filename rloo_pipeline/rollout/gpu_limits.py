"""Refuses on GPUs what vLLM samples on CPUs only; vLLM itself fails with an assertion deep inside an engine."""

from __future__ import annotations

from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError


def check(dtype: Dtype, has_adapter: bool) -> None:
    """Checks a run or an engine.

    Args:
        dtype: number format of the sampler.
        has_adapter: the run trains a LoRA adapter, or the engine serves one.

    Raises:
        UserError: vLLM cannot sample on a GPU like this.
    """
    if has_adapter and dtype == "float32":
        raise UserError(
            "model.dtype: float32 cannot be used with update.lora on a GPU, where vLLM computes adapters in 16 bits "
            "only; set model.dtype: bfloat16, or remove update.lora"
        )
