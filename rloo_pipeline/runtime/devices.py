"""GPUs: whether there are any, who holds them, and what they are called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from rloo_pipeline.runtime import rank


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; no library is asked."""
    return Path("/dev/nvidiactl").exists()


class HoldsGpu(Protocol):
    """What takes a GPU for itself and can leave it."""

    def leave_gpu(self) -> None:
        """Gives back its memory; it may take it again when it is used again. Nothing where it is on no GPU.

        Raises:
            IncompatibleEngine: it cannot, except by its end.
        """


_holders: WeakSet[HoldsGpu] = WeakSet()


def hold_gpu(holder: HoldsGpu) -> None:
    """Notes who is to leave when the GPU is needed."""
    _holders.add(holder)


def free_gpu() -> None:
    """Has all of this process leave the GPU to others, as far as they can."""
    for holder in list(_holders):
        holder.leave_gpu()


def hold_for_others(gpus: int) -> None:
    """Notes GPUs that the stage has for the processes that it starts, reward functions, and does not touch itself."""
    global _for_others
    _for_others = gpus


_for_others = 0


def gpus_used() -> str | None:
    """The GPUs that the stage had, `2 x NAME`; None where there are none or it needed none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{_granted(torch.cuda.device_count())} x {torch.cuda.get_device_name(0)}"
    name = _name_of_gpu() if _for_others else None
    return f"{_for_others} x {name}" if name else None


def _granted(here: int) -> int:
    """The GPUs of all of a stage's ranks: those that one sees, on so many nodes; a rank has at least its own."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if rank.RENDEZVOUS in os.environ else 1
    return max(here * nodes, int(os.environ.get("WORLD_SIZE", 1)))


def _name_of_gpu() -> str | None:
    """What the driver calls the first GPU, without a process of ours on it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().splitlines()[0] if said.strip() else None
