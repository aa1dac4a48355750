"""The jobs that a dry run would run: why, and how long they will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rloo_pipeline.snakemake_ext import failures, planned_time, reasons


class DryRun:
    """The jobs of a dry run, as Snakemake names them."""

    def __init__(self) -> None:
        self._jobs: list[reasons.PlannedJob] = []

    def add(self, rule: str, reason: str, logs: Sequence[str]) -> None:
        """Adds a job, with the reason that Snakemake gives."""
        log = logs[0] if logs else None
        self._jobs.append(reasons.PlannedJob(failures.RULES.get(rule, rule), reason, log))

    def lines(self, runs: Sequence[Path]) -> Iterator[str]:
        """Lines to print about the jobs; empty without jobs.

        Args:
            runs: folders of the runs that they belong to.
        """
        if not self._jobs:
            return
        count = len(self._jobs)
        yield f"{count} job{'s' if count > 1 else ''} would run:"
        for line in reasons.explain(self._jobs):
            yield f"  {line}"
        yield planned_time.sentence(self._logs(runs))
        yield "--logger-rloo-plain shows each job with its files and its command."

    def _logs(self, runs: Sequence[Path]) -> Iterator[tuple[Path, str]]:
        """Run and log of each job; jobs that are not stages, and rules of the user, have no such log."""
        by_name = {str(run): run for run in runs}
        for job in self._jobs:
            if job.log and (run := by_name.get(job.log.partition("/logs/")[0])):
                yield run, job.log
