"""When each job of a run worked, how long and on what: from its log, and from Snakemake's benchmark beside it.

This is of the clock and of the machine, so it is shown and never written into a result. A stage that came from a cache
has no log; a job that ran twice is counted as it ran last.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

TOOK = re.compile(
    r"^(?P<ended>\S+ \S+?)(?:,\d+)? INFO rloo\.time: took (?P<seconds>[0-9.]+) s"
    r"(?:, (?P<cpu>[0-9.]+) s of CPU, (?P<memory>\d+) MB at most)?$",
    re.MULTILINE,
)
USED = re.compile(r" INFO rloo\.time: used (?P<count>\d+) x (?P<name>.+)$", re.MULTILINE)


class Job(NamedTuple):
    """One job."""

    stage: str
    name: str
    began: datetime
    ended: datetime
    seconds: float
    gpus: int
    gpu: str | None
    """Its kind."""
    cpu_seconds: float | None
    """Time of all its cores; None where nothing says."""
    memory_mb: float | None
    """Its peak."""


class Cost(NamedTuple):
    """What a stage, or the run, took."""

    stage: str
    jobs: int
    seconds: float
    cpu_hours: float | None
    gpu_hours: float
    memory_mb: float | None


class Spent(NamedTuple):
    """How the time went between the begin of the first job and the end of the last one."""

    wall: float
    working: float
    """Seconds in which at least one job of the run worked."""

    @property
    def waiting(self) -> float:
        """Share of the time in which none did: queues, Snakemake, pauses."""
        return 1 - self.working / self.wall if self.wall else 0.0


def jobs_of(run: Path, rounds: int) -> list[Job]:
    """All jobs in the order of their begin; of a longer run that was here before, those of the first `rounds`."""
    folder, found = run / "logs", list[Job]()
    for file in sorted(folder.rglob("*.log")):
        if file.stem[:5].isdigit() and int(file.stem[:5]) > rounds:
            continue
        if file.parent.name == "workers":  # processes that did the work of jobs which have logs of their own
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if not (times := list(TOOK.finditer(text))):
            continue
        place = file.relative_to(folder).with_suffix("")
        seconds, used = float(times[-1]["seconds"]), USED.findall(text)
        ended = datetime.fromisoformat(times[-1]["ended"])
        cpu, memory = _measured(times[-1], run / "benchmarks" / place.with_suffix(".tsv"))
        found.append(
            Job(
                place.parts[0],
                "/".join(place.parts[1:]),
                ended - timedelta(seconds=seconds),
                ended,
                seconds,
                int(used[-1][0]) if used else 0,
                used[-1][1] if used else None,
                cpu,
                memory,
            )
        )
    return sorted(found, key=lambda job: (job.began, job.stage, job.name))


def seconds_by_stage(jobs: Sequence[Job]) -> dict[str, float]:
    """Wall seconds of all jobs of each stage."""
    return {cost.stage: round(cost.seconds, 1) for cost in costs(jobs)}


def costs(jobs: Sequence[Job]) -> list[Cost]:
    """What each stage took, the longest first."""
    stages = dict.fromkeys(job.stage for job in jobs)
    found = [together(stage, [job for job in jobs if job.stage == stage]) for stage in stages]
    return sorted(found, key=lambda cost: -cost.seconds)


def together(name: str, jobs: Sequence[Job]) -> Cost:
    """Several jobs as one line."""
    cpu = [job.cpu_seconds for job in jobs if job.cpu_seconds is not None]
    memory = [job.memory_mb for job in jobs if job.memory_mb is not None]
    return Cost(
        name,
        len(jobs),
        sum(job.seconds for job in jobs),
        sum(cpu) / 3600 if cpu else None,
        sum(job.seconds * job.gpus for job in jobs) / 3600,
        max(memory, default=None),
    )


def spent(jobs: Sequence[Job]) -> Spent:
    """How the time went."""
    working, until = 0.0, datetime.min
    for job in sorted(jobs, key=lambda job: job.began):
        working += max(0.0, (job.ended - max(job.began, until)).total_seconds())
        until = max(until, job.ended)
    wall = (until - min(job.began for job in jobs)).total_seconds() if jobs else 0.0
    return Spent(wall, working)


def _measured(said: re.Match[str], benchmark: Path) -> tuple[float | None, float | None]:
    """CPU seconds and peak memory (MB) of a job, of what the stage and Snakemake say the larger: Snakemake sees ranks
    that the stage started, and does not see the worker that did its work.
    """
    own = (said["cpu"], said["memory"])
    pairs = zip(own, _benchmark(benchmark), strict=True)
    cpu, memory = (max((float(one) for one in pair if one is not None), default=None) for pair in pairs)
    return cpu, memory


def _benchmark(file: Path) -> tuple[float | None, float | None]:
    """CPU seconds and peak memory (MB) of a job."""
    if not file.exists():
        return None, None
    with file.open(encoding="utf-8", newline="") as lines:
        row = next(csv.DictReader(lines, delimiter="\t"), {})

    def number(name: str) -> float | None:
        try:
            return float(row[name])
        except (KeyError, ValueError, TypeError):
            return None

    return number("cpu_time"), number("max_rss")
