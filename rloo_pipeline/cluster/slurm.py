"""What this package asks SLURM, by its own commands: states, ends and times to start again. No slurmdbd is needed."""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple

from rloo_pipeline.errors import UserError


class Job(NamedTuple):
    """A job in the queue."""

    state: str
    """As SLURM names it, such as PENDING or RUNNING."""
    reason: str
    """Why it waits, or the nodes that it runs on."""
    left: str
    """Time left to its limit, or UNLIMITED."""
    restarts: int
    """How often it went back into the queue."""


ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
"""States of a job that runs no more, which SLURM shows for some minutes."""


def own_job() -> str | None:
    """The id of the job that this process is in."""
    return os.environ.get("SLURM_JOB_ID")


def job(number: str) -> Job | None:
    """A job that waits or runs; None when it has ended or was never there.

    Raises:
        UserError: SLURM does not answer.
    """
    for line in _ask("squeue", "-h", "-t", "all", "-o", "%A|%T|%R|%L", "--job", number, unknown="Invalid job id"):
        found, state, reason, left = line.split("|", 3)
        if found == number and state not in ENDED:
            return Job(state, reason, left, _restarts(number))
    return None


def end_of(number: str) -> float | None:
    """Seconds since 1970 at which a running job's time is up; None where it has no limit.

    Raises:
        UserError: SLURM does not answer.
    """
    words = [line.strip() for line in _ask("squeue", "-h", "-o", "%e", "--job", number, SLURM_TIME_FORMAT="%s")]
    return float(words[0]) if words and words[0].isdigit() else None


def requeue(number: str) -> None:
    """Ends a running job and puts it back into the queue.

    Raises:
        UserError: SLURM refuses.
    """
    _ask("scontrol", "requeue", number)


def cancel(number: str) -> None:
    """Ends a job.

    Raises:
        UserError: SLURM refuses.
    """
    _ask("scancel", number)


def _restarts(number: str) -> int:
    words = " ".join(_ask("scontrol", "-o", "show", "job", number, unknown="Invalid job id")).split()
    return next((int(word.split("=")[1]) for word in words if word.startswith("Restarts=")), 0)


def _ask(*command: str, unknown: str = "\0", **environment: str) -> list[str]:
    """The lines that a command of SLURM says; none where its error has the words `unknown`."""
    try:
        outcome = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
        )
    except FileNotFoundError:
        raise UserError(f"no {command[0]} on the PATH: call this where SLURM's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"`{' '.join(command)}` gave no answer for two minutes; try again later") from None
    if outcome.returncode and unknown not in outcome.stderr:
        raise UserError(f"`{' '.join(command)}`: {' '.join(outcome.stderr.split()) or 'failed without a word'}")
    return [] if outcome.returncode else outcome.stdout.splitlines()
