"""Environment variables of a stage: no network, quiet libraries, a fixed number of threads.

Engines read them when they are imported, so `prepare` and `use_threads` run before any engine is imported.
"""

import atexit
import getpass
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

from rloo_pipeline.runtime import controller_watch, output, progress, ranks, scratch


def prepare(log: Path | None) -> None:
    """Sets the environment of the engines and redirects their output to `log`."""
    _name_user()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # On some CPUs, PEFT's import of bitsandbytes advises installing `kernels`, which would fetch code from the Hub.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # By default, Triton multiplies float32 matrices in TF32: vLLM was 0.015 nats from the trainer on an H200.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    # torch.cuda.is_available() must not create a CUDA context, since vLLM forks its processes for several GPUs.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # By default, CUDA gives the fastest GPU the number 0, nvidia-smi the first one on the bus.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not (os.environ.get("CUDA_PATH") or shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        _use_cuda_of_wheels()
    output.route_output(log)
    if log is not None or ranks.is_rank():
        controller_watch.watch()
        scratch.use()
    if log is not None and (node := os.environ.get("SLURMD_NODENAME")):
        step = ", as a step of the run's job" if ranks.STEP in os.environ else ""
        print(f"node: {node}{step}", flush=True)


def _name_user() -> None:
    """Gives a name to a user without one, as in `docker run --user 1000`; torch and Snakemake ask for it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # KeyError until Python 3.12
        os.environ["USER"] = str(os.getuid())


def _use_cuda_of_wheels() -> None:
    """Makes DeepSpeed and FlashInfer compile kernels with the CUDA of torch's wheels, if `make setup` has linked it."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for link in Path(folder).glob("cu[0-9]*/lib64"):
            os.environ.setdefault("CUDA_HOME", str(link.parent))


def use_threads(count: int) -> None:
    """Fixes the number of CPU threads of the engines; call it before they are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def set_until_end(name: str, value: str) -> None:
    """Sets a variable for child processes, until this process runs its exit handlers."""
    os.environ[name] = value
    atexit.register(os.environ.pop, name, None)


JOBS = {
    progress.STYLE: "lines",  # the progress bars of parallel jobs would overwrite each other on one terminal
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages, since engines allocate and free memory all the time
}
"""Environment variables for Snakemake's jobs; those that the user has set win."""


def prepare_jobs() -> None:
    """Sets what Snakemake's jobs inherit: JOBS, and a PATH with the `rloo` of this interpreter's environment."""
    _name_user()
    # srun passes on only what it names: nothing of the following in a job that sbatch started with --export=NONE
    for name in ("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV"):
        os.environ.pop(name, None)
    for name, value in JOBS.items():
        os.environ.setdefault(name, value)
    scripts, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, path])
