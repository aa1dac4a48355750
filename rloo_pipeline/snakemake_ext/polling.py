"""How Snakemake asks SLURM for its jobs: as often as their length makes it worthwhile, and not for ever.

Its SLURM plugin (2.8.0) has no settings for either. After each answer in which no job has ended it waits 10 s longer
for the next one, up to 180 s: a stage of a minute is seen to be done up to half a minute late. Here it waits a tenth of
the time since a job last ended. And to it a preempted job is one that SLURM puts back into the queue; where a
partition's PreemptMode is CANCEL, SLURM does not, and the plugin would wait for ever. Here such a job is submitted
again, as one that failed. So would it wait for what sacct calls `CANCELLED by 1000`; here that is `CANCELLED`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

LONGEST = 60.0
"""Seconds between two questions at most."""
SHARE = 0.1
PATIENCE = 5.0
"""Seconds after which a job that is still shown as preempted has not been put back."""


def in_measure(say: Callable[[str], None]) -> None:
    """Makes it so in this process, where it has loaded the plugin; `say` gets the line about a preempted job."""
    plugin: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None:
        return
    plugin.Executor.check_active_jobs = _often(plugin.Executor.check_active_jobs)
    plugin.query_job_status = _with_an_end(plugin.query_job_status, say)


def _often(check: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    ended = time.monotonic()

    async def check_active_jobs(self: Any, active_jobs: list[Any]) -> AsyncIterator[Any]:
        nonlocal ended
        left = 0
        async for job in check(self, active_jobs):
            left += 1
            yield job
        now = time.monotonic()
        if left < len(active_jobs) or not active_jobs:
            ended = now
        shortest = self.workflow.executor_settings.init_seconds_before_status_checks
        self.next_seconds_between_status_checks = max(shortest, min(LONGEST, SHARE * (now - ended)))

    return check_active_jobs


def _with_an_end(query: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Any]:
    since: dict[str, float] = {}
    told: set[str] = set()

    async def query_job_status(*words: Any) -> Any:
        nonlocal since
        found, seconds = await query(*words)
        states = found and {job: state.partition(" by ")[0] for job, state in found.items()}
        now = time.monotonic()
        since = {job: since.get(job, now) for job, state in (states or {}).items() if state == "PREEMPTED"}
        for job in (job for job, first in since.items() if now - first > PATIENCE):
            states[job] = "FAILED"
            if job not in told:
                told.add(job)
                say(f"SLURM job {job} was preempted and not put back into the queue, so it counts as failed")
        return states, seconds

    return query_job_status
