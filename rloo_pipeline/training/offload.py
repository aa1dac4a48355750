"""What a trainer keeps between two steps, out of its GPU and back.

Storages are emptied and filled again, and no tensor is replaced: DeepSpeed's flat buffers have views all over the model
and the optimizer, which stay what they are. Of 16-bit weights the host's memory takes 14 bytes each (the weight, its
float32 copy, two moments), of frozen ones 2; gradients are 0 between two steps and take none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from rloo_pipeline.errors import IncompatibleEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def put_aside(engine: DeepSpeedEngine) -> Callable[[], None]:
    """Takes weights and optimizer to the host's memory; what is returned takes them back.

    Raises:
        IncompatibleEngine: ZeRO 3, which keeps weights in buffers of its own.
    """
    if engine.zero_optimization_stage() == 3:
        raise IncompatibleEngine("weights that ZeRO 3 has split")
    held, zeros = [_emptied(storage) for storage in _storages(_lasting(engine))], list[tuple[UntypedStorage, int]]()
    for storage in _storages(getattr(engine.optimizer, "fp32_groups_gradients_flat", ())):
        zeros.append((storage, storage.nbytes()))
        storage.resize_(0)

    def take_back() -> None:
        for storage, copy in held:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for storage, size in zeros:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]

    return take_back


def _lasting(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Weights, their float32 copies, and the optimizer's moments."""
    optimizer = engine.basic_optimizer
    yield from engine.module.parameters()
    yield from engine.module.buffers()
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """What these lie in, each once."""
    return list({(found := tensor.untyped_storage())._cdata: found for tensor in tensors}.values())


def _emptied(storage: UntypedStorage) -> tuple[UntypedStorage, UntypedStorage]:
    """A storage that holds nothing any more, and a copy in the host's memory of what it held."""
    copy = UntypedStorage(storage.nbytes())
    copy.copy_(storage)
    storage.resize_(0)
    return storage, copy
