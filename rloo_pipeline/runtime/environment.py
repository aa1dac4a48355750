"""The environment of a stage: offline, with caches that are writable and threads that are fixed.

Engines read their settings from the environment when they are imported, so `prepare` runs before any import of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rloo_pipeline.runtime import output, progress, rank


def prepare(log: Path | None) -> None:
    """Sets the environment of the engines and where their words go."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # To ask whether there is a GPU must not begin to use it: vLLM's processes for several GPUs are forks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    output.route_output(log)
    if log is not None and (node := os.environ.get("SLURMD_NODENAME")):
        step = ", as a step of the run's job" if rank.STEP in os.environ else ""
        print(f"node: {node}{step}", flush=True)


def use_threads(count: int) -> None:
    """Fixes the CPU threads of the engines; to be called before they are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


JOBS = {
    progress.STYLE: "lines",  # the bars of several jobs on one terminal would overwrite each other
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # large pages, since engines take and give back memory all the time
}
"""Environment of Snakemake's jobs, as far as the user has none of these."""


def prepare_jobs() -> None:
    """What Snakemake's jobs inherit: JOBS, and an `rloo` of this interpreter's environment, activated or not."""
    for name, value in JOBS.items():
        os.environ.setdefault(name, value)
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if own not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([own, path])
