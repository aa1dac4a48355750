"""The process a stage runs in: offline, logged to a file, with caches that are writable and threads that are fixed.

Engines read their settings from the environment when they are imported, so `prepare` runs before any import of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from rich.console import Console
from rich.logging import RichHandler

from rloo_pipeline import progress

MEETING = "RLOO_MEETING"
"""Environment variable with the file by which ranks on several nodes find each other (cluster/nodes.py)."""

STEP = "RLOO_STEP"
"""Environment variable of stages that are steps of one SLURM job of several nodes (cluster/steps.py)."""


FAILED = "RLOO_FAILED"
"""Environment variable with the file in which ranks say why they failed. The first one counts: what the others see is
that it is gone.
"""


def is_rank() -> bool:
    """Whether this process is one of several that do a stage together."""
    return "TORCHELASTIC_RUN_ID" in os.environ or MEETING in os.environ


def tell_launcher(why: str) -> None:
    """Where this process is a rank: leaves the sentence with which it ends to the stage that started it."""
    if is_rank() and FAILED in os.environ:
        with contextlib.suppress(OSError), open(os.environ[FAILED], "x") as file:
            file.write(why)


def why_failed(file: Path, words: str) -> str:
    """What ranks left in `file`, else `words`."""
    return file.read_text() if file.exists() and file.stat().st_size else words


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
    _route_output(log)
    if log is not None and (node := os.environ.get("SLURMD_NODENAME")):
        step = ", as a step of the run's job" if STEP in os.environ else ""
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


@contextlib.contextmanager
def outputs_to(file: int) -> Iterator[None]:
    """A block in which standard output and error go to a descriptor, which is closed, as long as they are not turned
    elsewhere in it, which `prepare` does.
    """
    own = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), own, strict=True):
            os.dup2(before, number)
            os.close(before)


def begin(moment: float) -> None:
    """Says when the stage began that a worker is about to run, in seconds since 1970; its cost is counted from here."""
    global _began, _cpu_before
    _began, _cpu_before = moment, _cpu()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux, proc(5): the peak of the resident set begins anew


_began: float | None = None
_cpu_before = 0.0


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


def seconds_since_start() -> float:
    """Wall seconds since the stage began: since this process did, the interpreter's start and imports included."""
    import psutil

    return float(time.time() - (psutil.Process().create_time() if _began is None else _began))


def end() -> None:
    """The end of a stage that went well: says how long it took; one of several ranks leaves at once.

    gloo's threads abort the process now and then when the interpreter takes itself down, after all files are written.
    """
    if os.environ.get("RANK") in (None, "0") and (used := _used()):
        logging.getLogger("rloo.time").info("used %s", used)
    if not is_rank():
        spent = (seconds_since_start(), _cpu() - _cpu_before, _peak_mb())
        logging.getLogger("rloo.time").info("took %.1f s, %.2f s of CPU, %.0f MB at most", *spent)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _cpu() -> float:
    """Seconds of all cores for this process and those that it has started and seen end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_mb() -> float:
    """The largest resident set of this process, in MB."""
    said = Path("/proc/self/status").read_text()
    return int(said.partition("VmHWM:")[2].split()[0]) / 1024


def hold_for_others(gpus: int) -> None:
    """Notes GPUs that the stage has for the processes that it starts, reward functions, and does not touch itself."""
    global _for_others
    _for_others = gpus


_for_others = 0


def _used() -> str | None:
    """The GPUs that the stage had, `2 x NAME`; None where there are none or it needed none."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{_granted(torch.cuda.device_count())} x {torch.cuda.get_device_name(0)}"
    name = _name_of_gpu() if _for_others else None
    return f"{_for_others} x {name}" if name else None


def _granted(here: int) -> int:
    """The GPUs of all of a stage's ranks: those that one sees, on so many nodes; a rank has at least its own."""
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if MEETING in os.environ else 1
    return max(here * nodes, int(os.environ.get("WORLD_SIZE", 1)))


def _name_of_gpu() -> str | None:
    """What the driver calls the first GPU, without a process of ours on it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().splitlines()[0] if said.strip() else None


def cache_folder() -> Path:
    """XDG_CACHE_HOME or ~/.cache, or a folder on the node's own disk where a node cannot write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"rloo-{os.getuid()}"


def _route_output(log: Path | None) -> None:
    """Sends our own lines to the terminal, and everything, the engines' chatter included, to the log file."""
    root, own = logging.getLogger(), logging.getLogger("rloo")
    root.handlers.clear()
    own.handlers.clear()
    own.setLevel(logging.INFO)
    logging.captureWarnings(True)
    rank = os.environ.get("RANK")
    if log is not None:
        terminal = os.fdopen(os.dup(2), "w", buffering=1)
        progress.console = Console(file=terminal)
        _redirect(log)
    elif rank == "0" and progress.TERMINAL in os.environ:
        progress.console = Console(file=open(os.environ[progress.TERMINAL], "w", buffering=1))  # noqa: SIM115
    own.propagate = log is not None or rank is not None
    if own.propagate:
        to_log = logging.StreamHandler(sys.stderr)
        to_log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(to_log)
    if rank in (None, "0"):
        own.addHandler(_to_person())


def _redirect(log: Path) -> None:
    """Makes standard output and standard error of this process, and of what it starts, the log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _to_person() -> logging.Handler:
    """Lines for the person: through rich on a terminal, so that they do not tear a progress bar; plain otherwise."""
    if progress.console.is_terminal:
        return RichHandler(console=progress.console, show_path=False, show_time=False, show_level=False, markup=False)
    plain = logging.StreamHandler(progress.console.file)
    plain.setFormatter(logging.Formatter("%(message)s"))
    return plain
