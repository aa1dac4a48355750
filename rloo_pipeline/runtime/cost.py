"""Logs the cost of a stage when it ends: wall seconds, CPU seconds and peak memory."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.runtime import gpu_claims, ranks, scratch

if TYPE_CHECKING:
    import psutil

LOGGER = "rloo.time"
"""Logger for the cost, which goes to the log file but not to the terminal."""

_began: float | None = None
_cpu_before = 0.0
_others: Sequence[psutil.Process] = ()
"""Running processes whose CPU seconds count as this process's: the ranks of a worker."""


def begin(start: float) -> None:
    """Starts to count the cost of a stage in a worker.

    Args:
        start: when the stage was requested, in seconds since 1970.
    """
    global _began, _cpu_before
    _began, _cpu_before = start, _cpu()
    gpu_claims.note_subprocess_gpus(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux, proc(5): resets the peak of the resident set


def count_processes(processes: Sequence[psutil.Process]) -> None:
    """Counts the CPU seconds of these processes while they run, including their children that have ended."""
    global _others
    _others = processes


def add(seconds: float) -> None:
    """Counts CPU seconds that another process has spent for this stage."""
    global _cpu_before
    _cpu_before -= seconds


def seconds_since_start() -> float:
    """Wall seconds since the stage began; outside a worker, since this process began, including its imports."""
    import psutil

    return float(time.time() - (psutil.Process().create_time() if _began is None else _began))


def end() -> None:
    """Logs the cost of a stage that succeeded. A rank only logs its GPUs and its memory, and exits at once unless a
    worker keeps it.

    gloo's threads sometimes abort the process during interpreter shutdown, after all files are written.
    """
    if os.environ.get("RANK") in (None, "0") and (used := gpu_claims.gpus_used()):
        logging.getLogger(LOGGER).info("used %s", used)
    if not ranks.is_rank():
        spent = (seconds_since_start(), cpu_seconds(), _peak_mb())
        logging.getLogger(LOGGER).info("took %.1f s, %.2f s of CPU, %.0f MB at most", *spent)
        return
    logging.getLogger(LOGGER).info("rank %d: %.0f MB at most", ranks.current().number, _peak_mb())
    if _began is None:
        sys.stdout.flush()
        sys.stderr.flush()
        scratch.remove()
        os._exit(0)


def cpu_seconds() -> float:
    """CPU seconds since the stage began."""
    return _cpu() - _cpu_before


def _cpu() -> float:
    """CPU seconds of this process, of its children that have ended, and of its ranks."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + sum(map(_cpu_of, _others))


def _cpu_of(process: psutil.Process) -> float:
    """CPU seconds of another process; 0 if it has ended, since its parent then counts them."""
    import psutil

    try:
        return float(sum(process.cpu_times()[:4]))  # user and system time, its own and its children's
    except psutil.NoSuchProcess:
        return 0.0


def _peak_mb() -> float:
    """Peak resident set of this process in MB. It includes the pages of files that the process has mapped."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
