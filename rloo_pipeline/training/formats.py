"""Number formats that this machine can train and sample in."""

from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.deepspeed_internals import deepspeed_config

OLDEST_BFLOAT16 = 8.0
"""Lowest compute capability at which vLLM runs bfloat16; torch and DeepSpeed emulate it on older GPUs."""


def trains_in(dtype: Dtype) -> bool:
    """True if this machine supports a number format; DeepSpeed is asked about the 16-bit formats, except bfloat16 on
    GPUs, for which CUDA would have to start.
    """
    if dtype == "float32":
        return True
    if dtype == "bfloat16" and devices.device_type() == "cuda":
        return max(map(float, devices.gpu_facts("compute_cap")), default=OLDEST_BFLOAT16) >= OLDEST_BFLOAT16
    accelerator = deepspeed_config.accelerator()
    return bool(accelerator.is_fp16_supported() if dtype == "float16" else accelerator.is_bf16_supported())


def remedy(dtype: Dtype) -> str:
    """Advice for a 16-bit format that this machine lacks."""
    other = "bfloat16" if dtype == "float16" else "float16"
    return f"set model.dtype to {other} or float32, or use a machine whose processor or GPU supports it"


def check_dtype(dtype: Dtype) -> None:
    """Checks that this machine can train and sample in a number format.

    Raises:
        UserError: this machine lacks that format.
    """
    if not trains_in(dtype):
        raise UserError(f"model.dtype: {dtype} cannot be trained on this machine; {remedy(dtype)}")
