"""Reads start, duration and hardware of each job of a run from its log and Snakemake's benchmark file.

All of this depends on the clock and the machine, so it is only shown and never written into a result. A stage that came
from a cache has no log. If a job ran twice, its last run counts.
"""

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.errors import naming
from rloo_pipeline.judging.run_files import round_of
from rloo_pipeline.stages.table import ROWS

TOOK = re.compile(
    r"^(?P<ended>\S+ \S+?)(?:,\d+)? INFO rloo\.time: took (?P<seconds>[0-9.]+) s"
    r"(?:, (?P<cpu>[0-9.]+) s of CPU, \d+ MB at most)?$",
    re.MULTILINE,
)
PEAK = re.compile(r" INFO rloo\.time: .*\b(?P<megabytes>\d+) MB at most$", re.MULTILINE)
"""Pattern of a line with the peak memory of a process: the stage's, or one of its ranks."""
USED = re.compile(r" INFO rloo\.time: used (?P<count>\d+) x (?P<name>.+)$", re.MULTILINE)


STAGES_OF_ROUND = list(dict.fromkeys(row.log.partition("/")[0] for row in ROWS if row.phase == "round" and row.watched))
"""Stages between one policy and the next that take longer than seconds, by the names of their logs."""


class JobRecord(NamedTuple):
    """A job that has ended."""

    stage: str
    name: str
    began: datetime
    ended: datetime
    seconds: float
    gpus: int
    gpu: str | None
    """GPU model."""
    cpu_seconds: float | None
    """CPU time on all cores; None if not measured."""
    memory_mb: float | None
    """Peak resident set of the job's largest process, as in its log; None if not measured."""


class Cost(NamedTuple):
    """Cost of a stage or of the whole run."""

    stage: str
    jobs: int
    seconds: float
    cpu_hours: float | None
    gpu_hours: float
    memory_mb: float | None


class Spent(NamedTuple):
    """How the time from the start of the first job to the end of the last was spent."""

    wall: float
    """Total seconds."""
    working: float
    """Seconds in which at least one job of the run was running."""
    overlapping: float
    """Seconds in which rollouts and an update were running at the same time."""

    @property
    def waiting(self) -> float:
        """Share of the time in which no job was running: queues, Snakemake, pauses."""
        return 1 - self.working / self.wall if self.wall else 0.0


def jobs_of(run: Path, rounds: int, pages: bool = False) -> list[JobRecord]:
    """All jobs in the order in which they began, without those after round `rounds`, which a longer run left behind.
    Those that make pages are left out unless `pages`, since a page cannot have its own job.
    """
    logs = run / "logs"
    records = []
    for file in sorted(logs.rglob("*.log")):
        if not file.exists() or (round_of(file) or 0) > rounds:  # a link to a log that does not exist yet
            continue
        if file.parent.name == "workers":  # the work of workers is also in the logs of the jobs that used them
            continue
        if file.relative_to(logs).parts[0].startswith("report") and not pages:
            continue
        with naming(file):
            text = file.read_text(encoding="utf-8", errors="replace")
        if times := list(TOOK.finditer(text)):
            records.append(_record(run, file.relative_to(logs).with_suffix(""), text, times[-1]))
    return sorted(records, key=lambda job: (job.began, job.stage, job.name))


def _record(run: Path, name: Path, text: str, match: re.Match[str]) -> JobRecord:
    """Builds a job's record from its log and the last line in it that reports resource usage."""
    seconds, gpus = float(match["seconds"]), USED.findall(text)
    ended = datetime.fromisoformat(match["ended"])
    return JobRecord(
        stage=name.parts[0],
        name="/".join(name.parts[1:]),
        began=ended - timedelta(seconds=seconds),
        ended=ended,
        seconds=seconds,
        gpus=int(gpus[-1][0]) if gpus else 0,
        gpu=gpus[-1][1] if gpus else None,
        cpu_seconds=_cpu_seconds(match["cpu"], run / "benchmarks" / name.with_suffix(".tsv")),
        memory_mb=max(map(float, PEAK.findall(text)), default=None),
    )


def costs(jobs: Sequence[JobRecord]) -> list[Cost]:
    """Cost of each stage, longest first."""
    stages = dict.fromkeys(job.stage for job in jobs)
    by_stage = [total_cost(stage, [job for job in jobs if job.stage == stage]) for stage in stages]
    return sorted(by_stage, key=lambda cost: -cost.seconds)


def total_cost(name: str, jobs: Sequence[JobRecord]) -> Cost:
    """Total cost of several jobs, under a name."""
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


def spent(jobs: Sequence[JobRecord]) -> Spent:
    """Computes how a run's time was spent."""
    wall = (max(job.ended for job in jobs) - min(job.began for job in jobs)).total_seconds() if jobs else 0.0
    rollouts = [job for job in jobs if job.stage in ("rollout", "refill")]
    updates = [job for job in jobs if job.stage == "update"]
    both = _covered(rollouts) + _covered(updates) - _covered([*rollouts, *updates])
    return Spent(wall, _covered(jobs), max(both, 0.0))  # 0 may have become −0.0


def _covered(jobs: Sequence[JobRecord]) -> float:
    """Seconds in which at least one of these jobs was running."""
    seconds, until = 0.0, datetime.min
    for job in sorted(jobs, key=lambda job: job.began):
        seconds += max(0.0, (job.ended - max(job.began, until)).total_seconds())
        until = max(until, job.ended)
    return seconds


def _cpu_seconds(logged: str | None, benchmark: Path) -> float | None:
    """CPU seconds of a job: the larger of the values in its log and from Snakemake; None if neither has one.

    Snakemake counts the ranks that a stage started, but not the worker that did its work.
    """
    row: dict[str, str] = {}
    if benchmark.exists():
        with naming(benchmark), benchmark.open(encoding="utf-8", newline="") as lines:
            row = next(csv.DictReader(lines, delimiter="\t"), row)
    numbers = list[float]()
    for text in (logged, row.get("cpu_time")):
        with suppress(ValueError):
            numbers.append(float(text or ""))
    return max(numbers, default=None)
