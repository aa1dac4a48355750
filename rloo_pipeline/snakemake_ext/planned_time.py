"""Estimates the time of a dry run's jobs from jobs of their kind in the same run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rloo_pipeline.report import jobs as report_jobs
from rloo_pipeline.report.jobs import JobRecord
from rloo_pipeline.report.terminal_table import clock

ALL_ROUNDS = 99_999


def sentence(logs: Iterable[tuple[Path, str]]) -> str:
    """The work of the jobs in words, and how many jobs have no measurement.

    Args:
        logs: for each job the run's folder and the job's log, which names its kind.
    """
    seconds = gpu_seconds = 0.0
    unknown, known = 0, 0
    measured: dict[Path, dict[str, list[JobRecord]]] = {}
    for run, log in logs:
        if run not in measured:
            measured[run] = _by_kind(report_jobs.jobs_of(run, ALL_ROUNDS))
        alike = _alike(measured[run], run, log)
        known, unknown = known + bool(alike), unknown + (not alike)
        seconds += _mean([job.seconds for job in alike])
        gpu_seconds += _mean([job.seconds * job.gpus for job in alike])
    if not known:
        return "The time that takes is unknown: the run has finished no such job yet; `rloo plan` estimates it."
    gpus = f", {gpu_seconds / 3600:.2f} GPU-hours" if gpu_seconds else ""
    rest = f"; {unknown} of these jobs have no measurement yet" if unknown else ""
    hours = f"{seconds / 3600:.2f} hours{gpus}"
    return f"About {clock(seconds)} of work ({hours}), judging by such jobs of this run{rest}."


def _by_kind(jobs: Sequence[JobRecord]) -> dict[str, list[JobRecord]]:
    """Jobs by stage, and by the name of their log without its numbers: `evaluate` and `evaluate/final`."""
    kinds: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        for kind in {job.stage, _kind(f"{job.stage}/{job.name}".rstrip("/"))}:
            kinds[kind].append(job)
    return kinds


def _alike(measured: dict[str, list[JobRecord]], run: Path, log: str) -> list[JobRecord]:
    """Jobs of the same kind as the one with this log, else those of its stage."""
    name = Path(log).relative_to(run / "logs").with_suffix("")
    return measured.get(_kind(str(name))) or measured.get(name.parts[0], [])


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
