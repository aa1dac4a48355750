"""Number formats that this machine can train and sample in."""

import re
from math import inf

from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.deepspeed_internals import deepspeed_config

OLDEST_BFLOAT16 = 8.0
"""Lowest compute capability at which vLLM runs bfloat16; torch and DeepSpeed emulate it on older GPUs."""
NEWER_GPU = "a newer GPU (on a node with several kinds, name it in CUDA_VISIBLE_DEVICES)"
"""Advice, to follow "use"."""


def trains_in(dtype: Dtype) -> bool:
    """True if this machine supports a number format; DeepSpeed is asked about the 16-bit formats, except bfloat16 on
    GPUs, for which CUDA would have to start.
    """
    if dtype == "float32":
        return True
    if dtype == "bfloat16" and devices.device_type() == "cuda":
        return min(_compute_capabilities(), default=inf) >= OLDEST_BFLOAT16  # a job may run on any of them
    accelerator = deepspeed_config.accelerator()
    return bool(accelerator.is_fp16_supported() if dtype == "float16" else accelerator.is_bf16_supported())


def _compute_capabilities() -> list[float]:
    """Those of the GPUs of this process; empty if the driver does not tell."""
    return [float(capability) for capability in devices.gpu_facts("compute_cap")]


def remedy(dtype: Dtype) -> str:
    """Advice for a 16-bit format that this machine lacks."""
    other = "bfloat16" if dtype == "float16" else "float16"
    supported = NEWER_GPU if devices.device_type() == "cuda" else "a machine whose processor supports it"
    return f"set model.dtype to {other} or float32, or use {supported}"


def check_dtype(dtype: Dtype) -> None:
    """Checks that this machine can train and sample in a number format.

    Raises:
        UserError: this machine lacks that format, or torch is not built for its GPU.
    """
    refuse_old_gpu()
    if not trains_in(dtype):
        raise UserError(f"model.dtype: {dtype} cannot be trained on this machine; {remedy(dtype)}")


def refuse_old_gpu() -> None:
    """Raises UserError if torch has no kernels for a GPU of this process; torch itself would fail at the first one."""
    import torch

    built = [int(number) / 10 for number in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    if not built or devices.device_type() != "cuda":
        return
    if (capability := min(_compute_capabilities(), default=inf)) < min(built):
        raise UserError(
            f"a GPU of this machine has compute capability {capability}, and the installed torch {torch.__version__} "
            f"needs {min(built)}; use {NEWER_GPU}"
        )
