"""GPUs of this machine: whether there are any, which objects hold one, and their names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Protocol
from weakref import WeakSet


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, without importing a library."""
    return Path("/dev/nvidiactl").exists()


def device_type() -> str:
    """The device that torch and DeepSpeed compute on in this process: `cuda` or `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_bytes() -> float:
    """Memory that this process may fill: that of its GPU, or its share of `machine_bytes`."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return machine_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def machine_bytes() -> float:
    """Memory of this machine, or what SLURM gives the job on it; needs no torch."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    job = int(os.environ.get("SLURM_MEM_PER_NODE", 0)) * 2**20
    return float(min(machine, job or machine))


class HoldsGpu(Protocol):
    """An object that holds memory of a GPU and can free it."""

    def leave_gpu(self) -> None:
        """Frees the memory until the object is used again; does nothing where it holds none.

        Raises:
            IncompatibleEngine: only the end of the process frees the memory.
        """


_holders: WeakSet[HoldsGpu] = WeakSet()


def hold_gpu(holder: HoldsGpu) -> None:
    """Registers an object that `free_gpu` is to take off the GPU."""
    _holders.add(holder)


def free_gpu() -> None:
    """Frees the GPU memory of every registered object of this process."""
    for holder in list(_holders):
        holder.leave_gpu()


def nvidia_smi(fact: str) -> list[str]:
    """A fact about each GPU, such as its `name` or `index`, as the driver has it, without opening a CUDA context."""
    command = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return output.strip().splitlines()
