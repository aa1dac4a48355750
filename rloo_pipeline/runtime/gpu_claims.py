"""Claims GPUs of a machine for a stage, so that concurrent stages use different ones.

Snakemake counts the GPUs of running stages (`gpu_stages`) but does not assign them, so each stage would take the first
GPU. Therefore a stage binds an abstract Unix socket per GPU and puts these GPUs in CUDA_VISIBLE_DEVICES. The kernel
releases the sockets however the stage ends, and they leave no file. A SLURM job sees only its own GPUs, and different
jobs may number theirs alike, so the socket names contain the job's id.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.runtime.progress import say

TELL_SECONDS = 10.0
"""Time until a stage that waits for GPUs says so."""

_taken: list[str] = []
"""GPUs of this process; a worker cannot change them once CUDA has started."""
_sockets: list[socket.socket] = []
_set_aside: tuple[str, ...] = ()
"""GPUs of this process that are hidden from its engine, for environments."""
_subprocess_gpus = 0


def claim(needed: int, from_the_end: bool = False, patience: float = inf) -> None:
    """Takes GPUs for this process; waits until enough are free. Does nothing if no more are visible than needed.

    Args:
        needed: number of GPUs.
        from_the_end: takes the last ones. Trainers do, so that a warm sampler always has other GPUs.
        patience: seconds to wait if this process has had GPUs before, so that no others will do.

    Raises:
        UserError: there is none, though the installed packages are for GPUs.
        IncompatibleEngine: this process has claimed fewer before, or its own stay busy; the worker then restarts.
    """
    global _taken
    if not needed:
        return
    visible = _taken or devices.visible_gpus()
    is_sure = "CUDA_VISIBLE_DEVICES" in os.environ or not devices.has_gpu()  # else nvidia-smi may have failed
    if not visible and is_sure and devices.packages_are_for_gpus():  # torch would train on the CPU without a word
        raise UserError(
            "this process cannot use a GPU, but the packages installed here are for GPUs; ask SLURM for one (gres in "
            "the profile, or --gpus-per-node), or see what `nvidia-smi -L` says"
        )
    if not _taken and len(visible) <= needed:
        return
    if len(visible) < needed:
        raise IncompatibleEngine(f"{len(visible)} of {needed} GPUs")
    began = time.monotonic()
    tell, end = began + TELL_SECONDS, began + patience if _taken else inf
    while True:
        if free := _take(visible[::-1] if from_the_end and not _taken else visible, needed):
            _taken = [name for name in visible if name in free]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name for name in _taken if name not in _set_aside)
            return
        if time.monotonic() > tell:
            say(f"waiting for {needed} of this machine's {len(visible)} GPUs, which other stages of this user hold")
            tell = inf
        if time.monotonic() > end:
            raise IncompatibleEngine("GPUs that are busy")
        time.sleep(0.1)


def refuse_too_few(ranks: int) -> None:
    """Checks that each rank on this node can have a GPU, if the node has GPUs at all.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    visible = devices.visible_gpus() if devices.has_gpu() else []
    if visible and len(visible) < ranks:
        raise UserError(
            f"deepspeed.processes: {ranks} processes on a node with only {len(visible)} GPUs for this job; ask for "
            "more (gres in the profile, or --gpus-per-node), or lower it"
        )


def set_aside(count: int) -> None:
    """Takes the last GPUs out of CUDA_VISIBLE_DEVICES, for processes that this one starts. Does nothing on a machine
    without GPUs.

    Args:
        count: number of GPUs to take out.

    Raises:
        UserError: no GPU would be left.
        IncompatibleEngine: this process has set aside a different number before; the worker then restarts.
    """
    global _set_aside
    if len(_set_aside) == count or not (visible := devices.visible_gpus()):
        return
    if _set_aside:
        raise IncompatibleEngine(f"{len(_set_aside)} GPUs set aside instead of {count}")
    if len(visible) <= count:
        raise UserError(
            f"rollout.environment_gpus: {count} beside the engine's GPUs, but this job has only {len(visible)} in all; "
            "ask for more (gres in the profile), or lower it"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:-count])
    _set_aside = tuple(visible[-count:])


def names_set_aside(count: int) -> tuple[str, ...]:
    """Names of the GPUs that were set aside, as in CUDA_VISIBLE_DEVICES; in a stage without an engine, the first
    `count`.
    """
    return _set_aside or tuple(devices.visible_gpus()[:count] if count else ())


def release() -> None:
    """Gives the GPUs to other stages until the next `claim`. Only workers need it, since other processes end."""
    while _sockets:
        _sockets.pop().close()


@contextmanager
def lent() -> Iterator[None]:
    """A block in which other processes may claim the GPUs of this one, whose engines have left them."""
    release()
    try:
        yield
    finally:
        claim(len(_taken))


def note_subprocess_gpus(gpus: int) -> None:
    """Records GPUs that the stage does not use itself but passes to child processes (reward functions)."""
    global _subprocess_gpus
    _subprocess_gpus = gpus


def gpus_used() -> str | None:
    """The GPUs of the stage as `2 x NAME`; None if it had none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{_job_gpus(torch.cuda.device_count()) + len(_set_aside)} x {torch.cuda.get_device_name(0)}"
    names = devices.gpu_facts("name") if _subprocess_gpus else []
    return f"{_subprocess_gpus} x {names[0]}" if names else None


def _job_gpus(visible: int) -> int:
    """GPUs of all ranks of a stage: those visible to one rank times the nodes, and at least one per rank."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if ranks.RENDEZVOUS in os.environ else 1
    return max(visible * nodes, int(os.environ.get("WORLD_SIZE", 1)))


def _take(candidates: list[str], needed: int) -> list[str]:
    """Takes the first free ones, or none at all if too few are free."""
    free: list[str] = []
    for name in candidates:
        claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claimed.bind(f"\0rloo-gpu-{os.getuid()}-{os.environ.get('SLURM_JOB_ID', '')}-{name}")
        except OSError as error:
            claimed.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        _sockets.append(claimed)
        free.append(name)
        if len(free) >= needed:
            return free
    release()
    return []
