"""Queries and changes SLURM jobs with squeue, scontrol and scancel; needs no slurmdbd."""

import os
import time
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.slurm_commands import run


class SlurmJob(NamedTuple):
    """A job in the queue."""

    state: str
    """SLURM's name for the state, such as PENDING or RUNNING."""
    reason: str
    """Why it waits, or the nodes that it runs on."""
    time_left: str
    """Time left until the limit, or UNLIMITED."""
    restarts: int
    """Number of times that it was requeued."""


ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    "PREEMPTED",
)
"""States of jobs that have ended. SLURM still shows such jobs for some minutes."""


def own_job() -> str | None:
    """Id of the job that this process runs in; None outside of SLURM."""
    return os.environ.get("SLURM_JOB_ID")


def job_nodes() -> int:
    """Number of nodes of the job whose batch script started this process; 1 outside a job or in a step."""
    inside = own_job() is not None and "SLURM_STEP_ID" not in os.environ
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if inside else 1


def node_names() -> list[str]:
    """Names of the nodes of this process's job, in SLURM's order.

    Raises:
        UserError: SLURM does not answer.
    """
    return [*run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])]


def job(number: str) -> SlurmJob | None:
    """A job that is waiting or running; None if it has ended or never existed.

    Raises:
        UserError: SLURM does not answer.
    """
    for line in run("squeue", "-h", "-t", "all", "-o", "%A|%T|%R|%L", "--job", number, ignored_error="Invalid job id"):
        job_id, state, reason, time_left = line.split("|", 3)
        if job_id == number and state not in ENDED:
            restarts = int(_field(number, "Restarts", "0"))
            return SlurmJob(state, reason.removeprefix("(").removesuffix(")"), time_left, restarts)
    return None


def may_be_queued(number: str) -> bool:
    """True if a job is waiting or running, or SLURM does not answer. SLURM is asked at most once a minute, so the
    answer may be older.
    """
    return _was_queued(number, int(time.monotonic() // 60))


@lru_cache(100)
def _was_queued(number: str, minute: int) -> bool:
    del minute
    try:
        return job(number) is not None
    except UserError:
        return True


def ending(number: str) -> str:
    """How a job ended, such as TIMEOUT; empty if SLURM no longer knows.

    Raises:
        UserError: SLURM does not answer.
    """
    states = run("squeue", "-h", "-t", "all", "-o", "%T", "--job", number, ignored_error="Invalid job id")
    with suppress(UserError):  # sacct is missing, or the cluster keeps no records
        states = states or run("sacct", "-X", "-n", "-P", "-o", "State", "-j", number)
    return states[0].split()[0] if states else ""


def end_of(number: str) -> float | None:
    """Time at which a running job reaches its limit, in seconds since 1970; None without a limit.

    Raises:
        UserError: SLURM does not answer.
    """
    lines = [line.strip() for line in run("squeue", "-h", "-o", "%e", "--job", number, SLURM_TIME_FORMAT="%s")]
    return float(lines[0]) if lines and lines[0].isdigit() else None


def requeue(number: str) -> None:
    """Ends a running job and puts it back into the queue.

    Raises:
        UserError: SLURM refuses.
    """
    run("scontrol", "requeue", number)


def cancel(number: str) -> None:
    """Ends a job.

    Raises:
        UserError: SLURM refuses.
    """
    run("scancel", number)


def preempting(number: str) -> bool:
    """True if a running job is in the grace time before its preemption.

    Raises:
        UserError: SLURM does not answer.
    """
    return _field(number, "PreemptTime", "None") != "None"


def _field(number: str, name: str, default: str) -> str:
    fields = " ".join(run("scontrol", "-o", "show", "job", number, ignored_error="Invalid job id")).split()
    return next((field.split("=")[1] for field in fields if field.startswith(f"{name}=")), default)
