"""Tensors that leave a GPU between two stages, with their content in host memory.

The host memory is allocated once, since fresh memory makes the copies slower, and pinned, so that a GPU copies at the
speed of its link. It is pinned by CUDA itself: torch's own pinned memory has sizes that are powers of two. Storages are
emptied and refilled and no tensor is replaced, because a model and an optimizer may hold views into the same buffers.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from rloo_pipeline.runtime.progress import say

PORTABLE = 1
"""CUDA's flag for memory that is pinned for all of its contexts."""
TOLD = 1e9
"""Bytes from which the log says how long a move took."""


class HostCopies:
    """Host memory for the storages of an engine's tensors."""

    def __init__(self) -> None:
        self._copies: dict[int, UntypedStorage] = {}
        """Copies by `UntypedStorage._cdata`."""
        self._pinned: list[int] = []
        """Addresses of those that are pinned."""
        weakref.finalize(self, _unpin, self._pinned).atexit = False  # the end of the process releases it too

    def take(self, tensors: Iterable[Tensor], constant: bool = False) -> Callable[[], None]:
        """Copies the storages of tensors to host memory and empties them.

        Args:
            tensors: tensors that are not used until they are filled again.
            constant: True if they never change, so that one copy serves for all times.

        Returns:
            A function that fills them again.
        """
        began = time.monotonic()
        copies = [(storage, self._emptied(storage, constant)) for storage in storages(tensors)]
        size = sum(copy.nbytes() for _, copy in copies)
        _tell(size, "to", began)

        def restore() -> None:
            began = time.monotonic()
            for storage, copy in copies:
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
            _tell(size, "from", began)

        return restore

    def _emptied(self, storage: UntypedStorage, constant: bool) -> UntypedStorage:
        copy = self._copies.get(storage._cdata)
        if copy is None or copy.nbytes() != storage.nbytes():
            copy = self._copies[storage._cdata] = UntypedStorage(storage.nbytes())
            copy.copy_(storage)
            if storage.is_cuda and _pin(copy):
                self._pinned.append(copy.data_ptr())
        elif not constant:
            copy.copy_(storage)
        storage.resize_(0)
        return copy

    def of(self, values: object) -> object:
        """The same values, with the copies in place of tensors whose storages are empty."""

        def copied(tensor: Tensor) -> Tensor:
            copy = self._copies.get(tensor.untyped_storage()._cdata)
            if copy is None or tensor.untyped_storage().nbytes():
                return tensor
            return tensor.new_empty(0, device="cpu").set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

        return pytree.tree_map_only(Tensor, copied, values)


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of these tensors, each once."""
    return list({(storage := tensor.untyped_storage()).data_ptr(): storage for tensor in tensors}.values())


def _tell(size: int, way: str, began: float) -> None:
    if size > TOLD:
        say(f"moved {size / 1e9:.1f} GB {way} host memory in {time.monotonic() - began:.2f} s")


def _pin(copy: UntypedStorage) -> bool:
    """Pins host memory. False if CUDA refuses, and then copies are slower."""
    if not copy.nbytes():
        return False
    failed = int(torch.cuda.cudart().cudaHostRegister(copy.data_ptr(), copy.nbytes(), PORTABLE))
    if failed:
        say(f"CUDA cannot pin {copy.nbytes() / 1e9:.1f} GB of host memory (error {failed}), so moves are slower")
        with suppress(RuntimeError):  # of the next kernel, to which CUDA tells the error too
            torch.zeros(1, device="cuda")
    return not failed


def _unpin(addresses: Iterable[int]) -> None:
    """Releases pinned memory before it is freed."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
