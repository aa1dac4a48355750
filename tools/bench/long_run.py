"""Snakemake's CPU time for a round and its memory, at the beginning and at the end of a long run."""

from __future__ import annotations

import argparse
import time
from bisect import bisect
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import whole

ROUNDS, FIRST, WINDOW = 1000, 10, 50
"""Rounds of the run, the first that counts, and the rounds over which each mean is taken."""


class Look(NamedTuple):
    """Snakemake's process at a moment."""

    time: float
    """Seconds since 1970."""
    cpu_seconds: float
    memory: int
    """Bytes."""


def long_run(_: int, folder: Path, __: argparse.Namespace) -> dict[str, list[float]]:
    """A run of 1,000 rounds whose stages do nothing: CPU seconds of Snakemake for a round, and its memory."""
    empty = whole.empty_rloo(folder / "bin")
    changes = ("run=bench", f"rounds={ROUNDS}", "workers=never", "evaluation={each_round: 0}")
    project = whole.Project(folder / "project", "bench", "--config", *changes).start(empty)
    with whole.watching(_look) as found:
        project.rounds(ROUNDS, empty)
    looks = [look for look in found if look is not None]
    times = [look.time for look in looks]

    def after(round_: int) -> Look:
        ended = (project.run / "rounds" / f"{round_:05d}" / "metrics.json").stat().st_mtime
        return looks[min(bisect(times, ended), len(looks) - 1)]

    windows = [(after(first), after(first + WINDOW)) for first in (FIRST, ROUNDS - WINDOW)]
    begin, end = ((last.cpu_seconds - first.cpu_seconds) / WINDOW for first, last in windows)
    return {
        "long_run_seconds": [end],
        "long_run_overhead_end_vs_begin": [end / begin],
        "long_run_memory_end_vs_begin": [windows[1][1].memory / windows[0][1].memory],
    }


def _look() -> Look | None:
    """Looks at the process that this one has started."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            used = child.cpu_times()
            return Look(time.time(), used.user + used.system, child.memory_info().rss)
    return None
