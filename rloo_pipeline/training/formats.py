"""Number formats that this machine can train in, according to DeepSpeed."""

from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.training.deepspeed_internals import deepspeed_config

REMEDY = "set model.dtype to bfloat16 or float32, or use a machine whose processor or GPU supports it"


def trains_in(dtype: Dtype) -> bool:
    """True if this machine can train in a number format; DeepSpeed is asked about the 16-bit formats only."""
    if dtype == "float32":
        return True
    accelerator = deepspeed_config.accelerator()
    return bool(accelerator.is_fp16_supported() if dtype == "float16" else accelerator.is_bf16_supported())


def check_dtype(dtype: Dtype) -> None:
    """Checks that this machine can train in a number format.

    Raises:
        UserError: this machine cannot train in that format.
    """
    if not trains_in(dtype):
        raise UserError(f"model.dtype: {dtype} cannot be trained on this machine, says DeepSpeed; {REMEDY}")
