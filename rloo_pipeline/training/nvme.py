"""Optimizer state and weights in files on a disk of the node (`deepspeed.offload: nvme`, DeepSpeed's ZeRO-Infinity).

DeepSpeed keeps one sub-group of a rank's weights in memory at a time, with its moments. Its own `load_checkpoint`
leaves out what is on disk, so a trainer state is written and read here, sub-group by sub-group.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import mmap
import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts import policy
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard, ranks
from rloo_pipeline.training.compiled_operations import compiling

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from rloo_pipeline.training.settings import TrainerSettings

SUB_GROUP = 100_000_000
"""Weights of a rank whose state is in memory at a time."""
BUFFERS = {"optimizer": 4, "parameters": 5}
"""DeepSpeed's buffers: a sub-group's weights, gradients and two moments; tensors that are read ahead."""
ALIGNED = 1 << 20
"""DeepSpeed reads and writes in blocks; a buffer is larger than its content by less than this, in numbers."""
PREFIX, LOCK = "rloo-offload-", "lock"
_locks: list[Any] = []
"""Open files whose locks say that this process lives."""


class Sizes(NamedTuple):
    """Numbers in the tensors of a model."""

    largest: int
    total: int


def configuration(folder: Path, settings: TrainerSettings) -> JSON:
    """DeepSpeed's keys for the offload of `settings`, with a new folder on the disk of this rank.

    Raises:
        UserError: the disk, the memory that may be locked, or what DeepSpeed has to compile does not allow it.
    """
    world = ranks.current().world
    sizes = _sizes(policy.base_of(folder), settings.trust_remote_code)
    share, largest = -(-sizes.total // world), -(-sizes.largest // world)
    locked = BUFFERS["optimizer"] * 4 * (min(SUB_GROUP + largest, share) + ALIGNED)
    written = share * 16  # float32 weights, two moments, gradients
    path = str(_folder(settings.nvme_path))
    keys: JSON = {
        "sub_group_size": SUB_GROUP,
        "offload_optimizer": {"device": "nvme", "nvme_path": path, "buffer_count": BUFFERS["optimizer"]},
    }
    if settings.offload.parameters == "nvme":
        buffers = {"buffer_count": BUFFERS["parameters"], "buffer_size": largest + ALIGNED}
        keys["offload_param"] = {"device": "nvme", "nvme_path": path, **buffers}
        locked += BUFFERS["parameters"] * 2 * (largest + ALIGNED)
        written += share * 2
    elif settings.offload.parameters is not None:
        keys["offload_param"] = {"device": settings.offload.parameters}
    _check_space(Path(path), written)
    _check_lockable(locked)
    _compile()
    return keys


def _sizes(base: Path, trust_remote_code: bool) -> Sizes:
    from rloo_pipeline.training import plain_model

    model = plain_model.load_plain(base, "float32", trust_remote_code, device_map="meta")
    counts = [parameter.numel() for parameter in model.parameters()]
    return Sizes(max(counts), sum(counts))


def _folder(nvme_path: str | None) -> Path:
    """A new folder for this process, which is removed when it ends; folders that killed processes left are removed."""
    parent = Path(os.path.expandvars(nvme_path)) if nvme_path else Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise UserError(f"deepspeed.nvme_path: {parent} is no folder on this node; name one on its disk")
    for other in parent.glob(f"{PREFIX}*"):
        _remove_if_left(other)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        lock = (folder / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.close(os.open(folder / LOCK, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"deepspeed.nvme_path: {parent} is no disk of this node: it has no locks or no direct access ({error}); "
            "name a folder on one"
        ) from error
    _locks.append(lock)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove_if_left(folder: Path) -> None:
    """Removes a folder whose process has ended; one of another user stays."""
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its process lives, or has just made it
        pass


def _check_space(folder: Path, written: int) -> None:
    needed, free = written * (ranks.current().local + 1), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"deepspeed.nvme_path: {folder.parent} has {free / 1e9:,.1f} GB free, and {needed / 1e9:,.1f} GB are "
            "needed; name a folder on a larger disk, or use more nodes"
        )


def _check_lockable(needed: int) -> None:
    """Checks that this process may lock so much memory, which DeepSpeed's buffers need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with mmap.mmap(-1, needed) as memory:
            first = ctypes.c_char.from_buffer(memory)
            failed = libc.mlock(ctypes.byref(first), ctypes.c_size_t(needed))
            del first  # it would keep the memory open
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise UserError(
            f"deepspeed.offload: nvme locks {needed / 1e9:,.2f} GB of memory, and this node does not allow it "
            f"({error.strerror}; `ulimit -l` says how much); ask for a higher limit, or use `cpu`"
        ) from error


def _compile() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    guard.require("deepspeed")
    with compiling("its access to disks", "g++ and the headers of libaio (libaio-dev)"):
        AsyncIOBuilder().load(verbose=False)


def save_state(engine: DeepSpeedEngine, folder: Path, step: int) -> None:
    """Writes this rank's part of a trainer state: for each sub-group float32 weights and moments.

    Args:
        engine: DeepSpeed's.
        folder: of the state; it exists.
        step: optimizer steps so far.
    """
    from rloo_pipeline.training.deepspeed_config import save_reproducibly

    optimizer: Any = engine.optimizer
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        on_disk = optimizer._swappable_optimizer_subgroup(number)
        if on_disk:
            optimizer.optimizer_swapper.swap_in_optimizer_state(weights)
        # a tensor in a buffer would be written with the whole buffer
        moments = {key: _copy(value) for key, value in optimizer.optimizer.state.get(weights, {}).items()}
        values = {"step": step, "weights": weights.detach().clone(), "moments": moments}
        if on_disk:
            optimizer.optimizer_swapper.release_swap_buffers(weights)
        save_reproducibly(values, str(_file(folder, number)))


def load_state(engine: DeepSpeedEngine, folder: Path) -> int:
    """Reads this rank's part of a trainer state into an engine that has taken no step, as a step would change it.

    Returns:
        The number of optimizer steps so far.

    Raises:
        UserError: a file is damaged.
    """
    from rloo_pipeline.training.deepspeed_config import load_values

    optimizer: Any = engine.optimizer
    timers, step = set[str](), 0
    optimizer._partition_all_parameters()
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer._prepare_sub_group(number, timers)
        values = load_values(str(_file(folder, number)))
        step = int(values["step"])
        weights.data.copy_(values["weights"])
        if values["moments"]:
            optimizer.optimizer.state[weights] = values["moments"]
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer._release_sub_group(number, timers)
    optimizer._post_step(timers)
    return step


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _file(folder: Path, number: int) -> Path:
    return folder / f"rank{ranks.current().number:04}-group{number:04}.pt"
