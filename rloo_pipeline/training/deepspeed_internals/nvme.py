"""Optimizer state and weights in files on a disk of the node (`deepspeed.offload: nvme`, DeepSpeed's ZeRO-Infinity).

DeepSpeed keeps the weights and moments of one sub-group of a rank in memory at a time. Its own `load_checkpoint`
ignores what is on disk, so this module writes and reads a trainer state, sub-group by sub-group.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError, translate_write_errors
from rloo_pipeline.runtime import guard, ranks, scratch
from rloo_pipeline.training.deepspeed_internals.deepspeed_config import load_values, save_reproducibly

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor

SUB_GROUP = 100_000_000
"""Number of a rank's weights whose optimizer state is in memory at a time."""
BUFFERS = 4
"""Number of DeepSpeed's buffers for a sub-group: weights, gradients and two moments."""
READ = 5
"""Minimum number of DeepSpeed's buffers for reading weights: for the tensors of one module and of the next."""
ALIGNED = 1 << 20
"""DeepSpeed writes whole blocks, so a buffer exceeds its content by up to this many numbers."""
THREADS = 4
"""Number of files that a rank reads or writes at once."""
MOUNTS = Path("/proc/self/mountinfo")
"""Linux's list of mounted file systems, proc_pid_mountinfo(5)."""
WRITTEN = {"optimizer": 16, "parameters": 2}
"""Bytes on disk for each weight of a rank: float32 weights, two moments and gradients; bfloat16 weights."""


def disk(nvme_path: str | None) -> Path:
    """The folder on this node's disk in which each process makes a folder of its own.

    Raises:
        UserError: the folder does not exist, or it is the default one for temporary files and that is in memory.
    """
    folder = Path(os.path.expandvars(nvme_path)) if nvme_path else Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise UserError(f"deepspeed.nvme_path: {folder} is not a folder on this node; name one on its disk")
    if nvme_path is None and _in_memory(folder):
        raise UserError(
            f"deepspeed.nvme_path: the default, {folder} for temporary files, is in the memory of this node, so that "
            "offloading to it would save nothing; name a folder on its disk"
        )
    return folder


def _in_memory(folder: Path) -> bool:
    """True if a folder is on a file system in memory."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = MOUNTS.read_text().splitlines() if MOUNTS.exists() else []
    mounts = (line.split(" - ") for line in lines)
    return any(
        mount.split()[2] == number and file_system.split()[0] in ("ramfs", "tmpfs") for mount, file_system in mounts
    )


def new_folder(nvme_path: str | None, written: int) -> Path:
    """A new folder for this process, removed when it ends; also removes the folders that killed processes have left.

    Args:
        nvme_path: as for `disk`.
        written: bytes that each process writes.

    Raises:
        UserError: see `disk`; or the disk has too little space.
    """
    folder = Path(tempfile.mkdtemp(prefix="rloo-offload-", dir=disk(nvme_path)))
    scratch.claim(folder)
    needed, free = written * (ranks.current().local + 1), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"deepspeed.nvme_path: {folder.parent} has {free / 1e9:,.1f} GB free, and {needed / 1e9:,.1f} GB are "
            "needed; name a folder on a larger disk, or use more nodes"
        )
    return folder


def save_state(engine: DeepSpeedEngine, folder: Path, step: int) -> dict[str, str]:
    """Writes this rank's part of a trainer state: the float32 weights and moments of each sub-group.

    Returns the digests of the files, by their names.

    Args:
        engine: DeepSpeed's engine.
        folder: folder of the state; it exists.
        step: optimizer steps so far.
    """
    optimizer: Any = engine.optimizer
    digests = {}
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        on_disk = optimizer._swappable_optimizer_subgroup(number)
        if on_disk:
            optimizer.optimizer_swapper.swap_in_optimizer_state(weights)
        # torch.save would write the whole buffer of a tensor that lies in one
        moments = {key: _copy(value) for key, value in optimizer.optimizer.state.get(weights, {}).items()}
        values = {"step": step, "weights": weights.detach().clone(), "moments": moments}
        if on_disk:
            optimizer.optimizer_swapper.release_swap_buffers(weights)
        file = _file(folder, number)
        digests[file.name] = save_reproducibly(values, file)
    return digests


def load_state(engine: DeepSpeedEngine, folder: Path) -> int:
    """Reads this rank's part of a trainer state into an engine that has not taken a step yet.

    It swaps sub-groups in and out as DeepSpeed does around a step.

    Returns:
        The number of optimizer steps so far.

    Raises:
        UserError: a file is damaged.
    """
    import torch

    optimizer: Any = engine.optimizer
    timers, step = set[str](), 0
    optimizer._partition_all_parameters()
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer._prepare_sub_group(number, timers)
        values = load_values(str(_file(folder, number)))
        step = int(values["step"])
        weights.data.copy_(values["weights"])
        if moments := values["moments"]:
            moments["step"] = torch.as_tensor(moments["step"], dtype=torch.float32)  # DeepSpeed's AdamW wrote an int
            optimizer.optimizer.state[weights] = moments
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer._release_sub_group(number, timers)
    optimizer._post_step(timers)
    return step


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _file(folder: Path, number: int) -> Path:
    return folder / f"rank{ranks.current().number:04}-group{number:04}.pt"


def replace_access() -> None:
    """Makes DeepSpeed read and write with `Handle`.

    DeepSpeed ignores the result of reads and writes. If one fails, for example because the disk is full or an offset is
    not a multiple of 512 bytes, it continues with whatever is in the buffer.
    """
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, partitioned_param_swapper

    guard.require("deepspeed")
    operations = SimpleNamespace(aio_handle=Handle)
    for module in (partitioned_optimizer_swapper, partitioned_param_swapper):
        module.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda **_: operations)


class Handle:
    """A replacement for DeepSpeed's `aio_handle`: reads files into buffers and writes them, and raises on failure."""

    def __init__(self, **_: object) -> None:
        """Accepts and ignores DeepSpeed's options, which configure libaio."""
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
        """Waits for all operations that have begun; returns their number.

        Raises:
            UserError: the disk is full, or a file cannot be read or written completely.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        return len(pending)

    def new_cpu_locked_tensor(self, count: int, example: Tensor) -> Tensor:
        """A buffer in the format of `example`, pinned if there is a GPU, since GPUs copy from pinned memory."""
        import torch

        buffer = torch.empty(int(count), dtype=example.dtype, pin_memory=torch.cuda.is_available())
        self._buffers[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Releases a buffer. Returns False if `new_cpu_locked_tensor` did not make it."""
        return self._buffers.pop(buffer.untyped_storage().data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if a tensor lies in one of the buffers."""
        return tensor.untyped_storage().data_ptr() in self._buffers

    def _begin(self, action: Callable[[memoryview, Path], None], buffer: Tensor, path: str) -> int:
        import torch

        array: Any = buffer.detach().view(torch.uint8).numpy()
        self._pending.append(self._threads.submit(action, memoryview(array), Path(path)))
        return 0


def _read(content: memoryview, path: Path) -> None:
    with path.open("rb") as file:
        done = file.readinto(content)
    if done != len(content):
        raise UserError(f"{path}: only {done:,} of {len(content):,} bytes can be read; run again, on another disk")


def _write(content: memoryview, path: Path) -> None:
    with translate_write_errors(path.parent):
        path.write_bytes(content)
