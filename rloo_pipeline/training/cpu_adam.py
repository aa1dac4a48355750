"""DeepSpeed's AdamW for CPUs, whose moments and float32 weights are in host memory or on disk (`deepspeed.offload`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rloo_pipeline.runtime import guard
from rloo_pipeline.training.compiled_operations import compiling

if TYPE_CHECKING:
    from torch.optim import Optimizer


def build(groups: Iterable[dict[str, Any]], **options: Any) -> Optimizer:
    """DeepSpeedCPUAdam with decoupled weight decay, over groups of parameters with AdamW's options.

    Raises:
        UserError: it cannot be compiled here, or not by one process at a time.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    guard.require("deepspeed")
    with compiling("its AdamW for CPUs", "g++"):
        optimizer: Any = DeepSpeedCPUAdam(groups, **options)
    optimizer.register_step_pre_hook(_recreate)
    return optimizer  # type: ignore[no-any-return]


def _recreate(optimizer: Any, *_: object) -> None:
    """Creates the compiled part again before a step; it only remembers the powers of β₁ and β₂ of the last step.

    From step to step it multiplies them by β, but after a resume it computes the powers, which rounds differently.
    """
    group = optimizer.param_groups[0]
    optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
    options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode, False)
    optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *options)
