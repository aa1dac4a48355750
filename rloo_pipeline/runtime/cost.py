"""What a stage took: wall seconds, CPU seconds, memory; said at its end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from rloo_pipeline.runtime import devices, rank


def begin(moment: float) -> None:
    """Says when the stage began that a worker is about to run, in seconds since 1970; its cost is counted from here."""
    global _began, _cpu_before
    _began, _cpu_before = moment, _cpu()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux, proc(5): the peak of the resident set begins anew


_began: float | None = None


_cpu_before = 0.0


def seconds_since_start() -> float:
    """Wall seconds since the stage began: since this process did, the interpreter's start and imports included."""
    import psutil

    return float(time.time() - (psutil.Process().create_time() if _began is None else _began))


def end() -> None:
    """The end of a stage that went well: says how long it took; one of several ranks leaves at once.

    gloo's threads abort the process now and then when the interpreter takes itself down, after all files are written.
    """
    if os.environ.get("RANK") in (None, "0") and (used := devices.gpus_used()):
        logging.getLogger("rloo.time").info("used %s", used)
    if not rank.is_rank():
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
