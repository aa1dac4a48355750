"""Moves a trainer's weights and optimizer from the GPU to host memory and back, between two steps.

The host memory is allocated once, since fresh memory makes the copies slower.

Storages are emptied and refilled and no tensor is replaced, because the model and the optimizer hold views into
DeepSpeed's flat buffers. A trained 16-bit weight takes 14 bytes of host memory (the weight, its float32 copy, two
moments), a frozen one 2; gradients are 0 between two steps and take none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from rloo_pipeline.errors import IncompatibleEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


Copies = dict[int, UntypedStorage]
"""Copies of storages in host memory, by `UntypedStorage._cdata`."""


def obstacle(engine: DeepSpeedEngine) -> str | None:
    """The reason for which an engine cannot be moved: ZeRO 3 and `deepspeed.offload` have buffers of their own."""
    if engine.zero_cpu_offload():
        return "an optimizer that is in host memory already"
    return "weights that ZeRO 3 has split" if engine.zero_optimization_stage() == 3 else None


def to_host(engine: DeepSpeedEngine, buffers: Copies) -> Callable[[], None]:
    """Moves weights and optimizer to host memory.

    Args:
        engine: DeepSpeed's.
        buffers: gets the copies; those of the last time are overwritten.

    Returns:
        A function that moves them back.

    Raises:
        IncompatibleEngine: there is an `obstacle`.
    """
    if reason := obstacle(engine):
        raise IncompatibleEngine(reason)
    copies = [(storage, _emptied(storage, buffers)) for storage in _storages(_persistent(engine))]
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


def _emptied(storage: UntypedStorage, buffers: Copies) -> UntypedStorage:
    """Empties a storage; returns a copy of its content in host memory."""
    copy = buffers.get(storage._cdata)
    if copy is None or copy.nbytes() != storage.nbytes():
        copy = buffers[storage._cdata] = UntypedStorage(storage.nbytes())
    copy.copy_(storage)
    storage.resize_(0)
    return copy


def in_host_memory(values: object, buffers: Copies) -> object:
    """The same values, with the copies in host memory in place of tensors that were moved there."""

    def copied(tensor: Tensor) -> Tensor:
        copy = buffers.get(tensor.untyped_storage()._cdata)
        if copy is None or tensor.untyped_storage().nbytes():
            return tensor
        return tensor.new_empty(0, device="cpu").set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    return pytree.tree_map_only(Tensor, copied, values)
