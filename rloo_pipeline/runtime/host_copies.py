"""Moves tensors off a GPU between two stages and keeps their content in host memory.

The host memory is mapped once, since copies into fresh memory are slower, and pinned, so that a GPU copies at the speed
of its link. CUDA pins it directly, since torch rounds sizes of pinned memory up to powers of two. Storages are emptied
and refilled in place, because a model and an optimizer may hold views into the same buffers.
"""

import mmap
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.progress import say

ALIGNED = 512
"""Alignment of the copies in bytes."""
PORTABLE = 1
"""CUDA's flag for memory that is pinned for all of its contexts."""
TOLD = 1e9
"""Moves of at least this many bytes have their time in the log."""

Storages = dict[int, UntypedStorage]
"""Storages by `UntypedStorage._cdata`."""


def activations(offloads: bool) -> AbstractContextManager[Any]:
    """A block whose activations, stored for the backward pass, go to host memory if offloading is on."""
    return torch.autograd.graph.save_on_cpu(devices.device_type() == "cuda") if offloads else nullcontext()


class HostCopies:
    """Host memory for the storages of an engine's tensors."""

    def __init__(self) -> None:
        self._copies: Storages = {}
        """The copy of each storage."""
        self._taken: list[tuple[UntypedStorage, UntypedStorage]] = []
        """The storages that are empty now, with their copies."""
        self._zeros: list[tuple[UntypedStorage, int]] = []
        """Storages of zeros that are empty now, with their sizes."""
        self._pinned: list[int] = []
        """Addresses of pinned memory."""
        weakref.finalize(self, _unpin, self._pinned).atexit = False  # when the process ends, it is released anyway

    def take(self, tensors: Iterable[Tensor], constants: Iterable[Tensor] = (), zeros: Iterable[Tensor] = ()) -> None:
        """Copies the storages of tensors to host memory and empties them until `restore`, unless they are empty now.

        Args:
            tensors: tensors that are not used until they are filled again.
            constants: further tensors, which never change, so that one copy serves every time.
            zeros: further tensors, which are all 0 and need no copy.
        """
        if self._taken:
            return
        began = time.monotonic()
        changing = storages(tensors)
        taken = changing | storages(constants)
        sizes = {key: copy.nbytes() for key, copy in self._copies.items()}
        new = {key: storage for key, storage in taken.items() if sizes.get(key) != storage.nbytes()}
        memory = self._map(new)
        for key, storage in (new | changing).items():
            self._copies[key].copy_(storage)
        if memory is not None and any(storage.is_cuda for storage in new.values()) and _pin(memory):
            self._pinned.append(memory.data_ptr())
        self._taken = [(storage, self._copies[key]) for key, storage in taken.items()]
        self._zeros = [(storage, storage.nbytes()) for storage in storages(zeros).values()]
        for storage, _ in (*self._taken, *self._zeros):
            storage.resize_(0)
        self._log_move("to", began)

    def restore(self) -> None:
        """Refills what `take` has emptied, if anything."""
        began = time.monotonic()
        for storage, copy in self._taken:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for storage, size in self._zeros:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]
        self._log_move("from", began)
        self._taken, self._zeros = [], []

    def _log_move(self, way: str, began: float) -> None:
        size = sum(copy.nbytes() for _, copy in self._taken)
        if size > TOLD:
            say(f"moved {size / 1e9:.1f} GB {way} host memory in {time.monotonic() - began:.2f} s")

    def _map(self, new: Storages) -> Tensor | None:
        """Maps one block of memory for the copies of all these storages; None if they are empty."""
        ends = [*accumulate(-(-storage.nbytes() // ALIGNED) * ALIGNED for storage in new.values())]
        if not ends or not ends[-1]:
            self._copies |= {key: UntypedStorage(0) for key in new}
            return None
        memory = mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        for (key, storage), begin in zip(new.items(), [0, *ends], strict=False):
            size = storage.nbytes()
            piece = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin) if size else torch.empty(0)
            self._copies[key] = piece.untyped_storage()
        return torch.frombuffer(memory, dtype=torch.uint8)

    def of(self, values: object) -> object:
        """The same values, with host copies in place of tensors whose storages are empty."""

        def copied(tensor: Tensor) -> Tensor:
            copy = self._copies.get(tensor.untyped_storage()._cdata)
            if copy is None or tensor.untyped_storage().nbytes():
                return tensor
            view = tensor.new_empty(0, device="cpu").set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
            return view.requires_grad_(tensor.requires_grad)  # torch.save writes this flag too

        return pytree.tree_map_only(Tensor, copied, values)


def storages(tensors: Iterable[Tensor]) -> Storages:
    """The storages of these tensors, each once."""
    return {(storage := tensor.untyped_storage())._cdata: storage for tensor in tensors}


def _pin(memory: Tensor) -> bool:
    """Pins host memory. Returns False if CUDA refuses; copies are slower then."""
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
    if failed:
        say(f"CUDA cannot pin {memory.nbytes / 1e9:.1f} GB of host memory (error {failed}), so moves are slower")
        with suppress(RuntimeError):  # CUDA reports the error to the next kernel too
            torch.zeros(1, device="cuda")
    return not failed


def _unpin(addresses: Iterable[int]) -> None:
    """Releases pinned memory before it is freed."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
