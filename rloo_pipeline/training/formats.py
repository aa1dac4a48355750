"""Number formats that a machine trains in, by DeepSpeed's own word."""

from __future__ import annotations

import os

from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import import_shims

CURE = "set model.dtype to bfloat16 or float32, or go to a machine whose processor or GPU does"


def trains_in(dtype: Dtype) -> bool:
    """Whether this machine trains in a number format; only of those of 16 bits DeepSpeed is asked."""
    if dtype == "float32":
        return True
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import_shims.import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return bool(accelerator.is_fp16_supported() if dtype == "float16" else accelerator.is_bf16_supported())


def refuse(dtype: Dtype) -> None:
    """Makes sure that this machine trains in a number format.

    Raises:
        UserError: it does not.
    """
    if not trains_in(dtype):
        raise UserError(f"model.dtype: {dtype} cannot be trained on this machine, says DeepSpeed; {CURE}")
