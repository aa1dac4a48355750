"""Checks a node's GPUs: driver, memory, links, kernels, and vLLM's start-up time."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rloo_pipeline.before_run import image
from rloo_pipeline.before_run.findings import Finding
from rloo_pipeline.before_run.gpu_kernels import KERNELS
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.caches import cache_folder
from rloo_pipeline.training.formats import NEWER_GPU, OLDEST_BFLOAT16

SECONDS = 180
"""Time limit in seconds for compiling and running one kernel."""
NEEDED = {
    "FlashAttention": "needed for training in 16 bits; GPUs older than Ampere (compute capability 8.0) do without it",
    "Triton": "vLLM needs it: a C compiler (gcc) and the headers of Python must be on this node",
    "nvcc": "DeepSpeed needs it for offload to the CPU, and FlashInfer for its kernels",
}
"""Advice for each kernel, given if it does not run."""
OLDEST = 7.5
"""Lowest compute capability of CUDA 13."""
FIRST_START, LATER_STARTS = 73, 43
"""Seconds to vLLM's first token, without and with its compile cache, for 1.7 billion weights on an H200."""


def findings(config: Config, in_image: bool, vllm_cache: Path | None = None) -> Iterator[Finding]:
    """Runs all checks; does nothing on a machine without an NVIDIA GPU, but notes an AMD one.

    Args:
        config: the run's configuration.
        in_image: True if stages run in the image, whose own `apptainer test` runs the kernels.
        vllm_cache: default folder of vLLM's cache for these stages; None for vLLM's own default.
    """
    if not devices.has_gpu():
        if Path("/dev/kfd").exists():  # of AMD's driver
            yield Finding("GPUs", True, "AMD GPUs are not supported: everything would run on the CPU here", note=True)
        return
    names = devices.visible_gpus()
    rows = [row.split(", ") for row in devices.gpu_facts("name,memory.total,compute_cap,driver_version,compute_mode")]
    if not names or not rows:
        fix = "ask SLURM for one (--gres=gpu:1), set CUDA_VISIBLE_DEVICES, or see what `nvidia-smi -L` says"
        yield Finding("GPUs", False, "this process may use none", fix)
        return
    for name, memory, capability, *_ in sorted(map(tuple, rows)):
        # the driver's table has no slices; the name of a slice says its memory
        size = f"{int(memory) * 2**20 / 1e9:.1f} GB" if memory.isdigit() else "memory shared with the host"  # [N/A]
        shown = devices.card() if names[0].startswith(devices.SLICE) else f"{name}, {size}"
        message = f"{shown}, compute capability {capability}"
        yield compute_capability(message, float(capability), config)
    yield Finding("GPUs", True, f"{len(names)} for this process, so as many stages can run at once: {', '.join(names)}")
    if config.workers != "never" and rows[0][4] == "Exclusive_Process":
        message = "Exclusive_Process allows one process per GPU, but the warm engines of a run share theirs"
        yield Finding("compute mode", False, message, "set `workers: never`, or ask for the compute mode Default")
    if len(names) > 1:
        yield Finding("links", True, links(devices.nvidia_smi("topo", "-m")))
    if not in_image:
        yield driver(rows[0][3], image.driver())
        if not devices.packages_are_for_gpus():
            message, fix = "those for CPUs are installed here", "run `make setup ACCELERATOR=cuda`"
            yield Finding("packages", False, message, fix)
            return
        yield from map(kernel, KERNELS)
    yield start(Path(os.environ.get("VLLM_CACHE_ROOT", vllm_cache or cache_folder() / "vllm")))


def links(topology: list[str]) -> str:
    """Describes how GPUs are linked, from the output of `nvidia-smi topo -m`."""
    rows = [line.split() for line in topology if re.match(r"GPU\d", line)]
    kinds = {word for row in rows for word in row if re.fullmatch(r"NV\d+", word)}
    return f"NVLink between GPUs ({', '.join(sorted(kinds))})" if kinds else "no NVLink between GPUs"


def compute_capability(message: str, capability: float, config: Config) -> Finding:
    """Checks that a GPU is new enough for the pinned packages and for the run's number format."""
    if capability < OLDEST and config.container.image is None:
        return Finding("GPU", False, f"{message}; CUDA 13 needs {OLDEST}", f"use {NEWER_GPU}")
    if config.model.dtype == "bfloat16" and capability < OLDEST_BFLOAT16:
        fix = f"set model.dtype to float16 or float32, or use {NEWER_GPU}"
        return Finding("GPU", False, f"{message}; vLLM needs {OLDEST_BFLOAT16} for bfloat16", fix)
    return Finding("GPU", True, message)


def driver(version: str, supported: tuple[int, int] | None) -> Finding:
    """Checks that the driver supports the CUDA version of the pinned packages.

    Args:
        version: driver version.
        supported: highest CUDA version that the driver supports; None if libcuda cannot be loaded.
    """
    if supported is None:
        return Finding("driver", False, f"{version}, but libcuda.so.1 cannot be loaded", "reinstall the driver")
    message = f"{version}, for CUDA {supported[0]}.{supported[1]}"
    needed = 0
    with suppress(importlib.metadata.PackageNotFoundError):
        needed = int(importlib.metadata.version("nvidia-cuda-runtime").partition(".")[0])
    if supported[0] >= needed:
        return Finding("driver", True, message)
    message += f"; the installed packages are for CUDA {needed}"
    return Finding("driver", False, message, image.newer_driver(needed, "LD_LIBRARY_PATH"))


def kernel(name: str) -> Finding:
    """Runs one kernel on a GPU of this process."""
    command = [sys.executable, "-m", "rloo_pipeline.before_run.gpu_kernels", name]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"no result in {SECONDS} s", NEEDED[name])
    if process.returncode == 0:
        return Finding(name, True, process.stdout.strip().splitlines()[-1])
    last = (process.stderr.strip().splitlines() or [f"ended with status {process.returncode}"])[-1]
    return Finding(name, False, f"does not run: {last}", NEEDED[name])


def start(cache: Path) -> Finding:
    """Says how long vLLM takes to start, with and without its compile cache."""
    message = (
        f"a model that is not in {cache / 'torch_compile_cache'} takes {FIRST_START} s to its first token, one that is "
        f"{LATER_STARTS} s (1.7 billion weights, H200); to keep it, set VLLM_CACHE_ROOT to a folder that stays and "
        "that all nodes see"
    )
    return Finding("vLLM's start", True, message)
