"""Moves a trainer's weights and optimizer from the GPU to host memory and back, between two steps.

A trained 16-bit weight takes 14 bytes of host memory (the weight, its float32 copy, two moments), a frozen one 2.
Gradients take none, since they are 0 between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.training.host_copies import HostCopies

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def obstacle(engine: DeepSpeedEngine) -> str | None:
    """The reason an engine cannot be moved, if any: ZeRO 3 and `deepspeed.offload` have buffers of their own."""
    if engine.zero_cpu_offload():
        return "an optimizer that is in host memory already"
    return "weights that ZeRO 3 has split" if engine.zero_optimization_stage() == 3 else None


def to_host(engine: DeepSpeedEngine, copies: HostCopies) -> None:
    """Moves weights and optimizer to host memory, until `copies.restore`.

    Raises:
        IncompatibleEngine: there is an `obstacle`.
    """
    if reason := obstacle(engine):
        raise IncompatibleEngine(reason)
    frozen = (weights for weights in engine.module.parameters() if not weights.requires_grad)
    copies.take(_changing_tensors(engine), frozen, getattr(engine.optimizer, "fp32_groups_gradients_flat", ()))


def _changing_tensors(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Trained weights, their float32 copies, and the optimizer's moments."""
    optimizer = engine.basic_optimizer
    yield from (weights for weights in engine.module.parameters() if weights.requires_grad)
    yield from engine.module.buffers()
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))
