"""Reads and writes the files of `deepspeed.offload: nvme`, in place of DeepSpeed's access to disks.

DeepSpeed ignores the result of reads and writes. If one fails, for example because the disk is full or an offset is not
a multiple of 512 bytes, it goes on with whatever is in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError, translate_disk_full
from rloo_pipeline.runtime import guard

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 4
"""Files that a rank reads or writes at once."""


def replace() -> None:
    """Makes DeepSpeed read and write with `Handle`."""
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, partitioned_param_swapper

    guard.require("deepspeed")
    operations = SimpleNamespace(aio_handle=Handle)
    for module in (partitioned_optimizer_swapper, partitioned_param_swapper):
        module.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda **_: operations)


class Handle:
    """A replacement for DeepSpeed's `aio_handle`: reads files into buffers and writes them, and raises on failure."""

    def __init__(self, **_: object) -> None:
        """Takes and ignores DeepSpeed's options, which are those of libaio."""
        self._threads = ThreadPoolExecutor(THREADS)
        self._pending: list[Future[None]] = []
        self._buffers: dict[int, Tensor] = {}

    def async_pread(self, buffer: Tensor, path: str, _: int) -> int:
        """Begins to fill a buffer from a file; returns 0."""
        return self._begin(_read, buffer, path)

    def async_pwrite(self, buffer: Tensor, path: str, _: int) -> int:
        """Begins to write a buffer to a file; returns 0."""
        return self._begin(_write, buffer, path)

    def wait(self) -> int:
        """Waits for all that has begun; returns its number.

        Raises:
            UserError: the disk is full, or a file cannot be read or written whole.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        return len(pending)

    def new_cpu_locked_tensor(self, count: int, example: Tensor) -> Tensor:
        """A buffer in the format of `example`; GPUs copy from pinned memory."""
        import torch

        buffer = torch.empty(int(count), dtype=example.dtype, pin_memory=torch.cuda.is_available())
        self._buffers[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Releases a buffer. Returns False if `new_cpu_locked_tensor` did not make it."""
        return self._buffers.pop(buffer.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if a tensor is in a buffer."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _begin(self, action: Callable[[memoryview, Path], None], buffer: Tensor, path: str) -> int:
        import torch

        array: Any = buffer.detach().view(torch.uint8).numpy()
        self._pending.append(self._threads.submit(action, memoryview(array), Path(path)))
        return 0


def _read(content: memoryview, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        done = 0
        while count := file.readinto(content[done:]):
            done += count
    if done != len(content):
        raise UserError(f"{path}: {done:,} bytes can be read of {len(content):,}; run again, on another disk")


def _write(content: memoryview, path: Path) -> None:
    with translate_disk_full(path.parent), path.open("wb", buffering=0) as file:
        done = 0
        while done < len(content):
            done += file.write(content[done:])
