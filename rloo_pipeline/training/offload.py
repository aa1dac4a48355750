"""Moves a trainer's weights and optimizer from the GPU to host memory and back, between two steps.

Storages are emptied and refilled and no tensor is replaced, because the model and the optimizer hold views into
DeepSpeed's flat buffers. A trained 16-bit weight takes 14 bytes of host memory (the weight, its float32 copy, two
moments), a frozen one 2; gradients are 0 between two steps and take none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from rloo_pipeline.errors import IncompatibleEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def to_host(engine: DeepSpeedEngine) -> Callable[[], None]:
    """Moves weights and optimizer to host memory.

    Returns:
        A function that moves them back.

    Raises:
        IncompatibleEngine: under ZeRO 3 or `deepspeed.offload`, which keep weights in buffers of their own.
    """
    if engine.zero_cpu_offload():
        raise IncompatibleEngine("an optimizer that is in host memory already")
    if engine.zero_optimization_stage() == 3:
        raise IncompatibleEngine("weights that ZeRO 3 has split")
    copies = [_emptied(storage) for storage in _storages(_persistent(engine))]
    zeros = list[tuple[UntypedStorage, int]]()
    for storage in _storages(getattr(engine.optimizer, "fp32_groups_gradients_flat", ())):
        zeros.append((storage, storage.nbytes()))
        storage.resize_(0)

    def restore() -> None:
        for storage, copy in copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for storage, size in zeros:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]

    return restore


def _persistent(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Weights, their float32 copies, and the optimizer's moments."""
    optimizer = engine.basic_optimizer
    yield from engine.module.parameters()
    yield from engine.module.buffers()
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of these tensors, each once."""
    return list({(storage := tensor.untyped_storage()).data_ptr(): storage for tensor in tensors}.values())


def _emptied(storage: UntypedStorage) -> tuple[UntypedStorage, UntypedStorage]:
    """Empties a storage; returns it with a copy of its content in host memory."""
    copy = UntypedStorage(storage.nbytes())
    copy.copy_(storage)
    storage.resize_(0)
    return storage, copy
