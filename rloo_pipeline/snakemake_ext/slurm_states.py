"""What the state that SLURM shows for a job means for the run. No SLURM and no Snakemake in here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

PUT_BACK = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
"""States of a job that SLURM puts back into the queue, where the cluster and the job allow it."""
PUT_BACK_WITHIN = 5.0
"""Seconds after which a job that still shows one of these states has not been put back."""
FAILED = ("DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT")
FORGOTTEN_AFTER = 300.0
"""Seconds for which SLURM may not list a job. Longer than an accounting database lags, and squeue shows ended jobs for
this long by default (MinJobAge)."""


class Outcome(Enum):
    """What Snakemake is told of a job."""

    ACTIVE = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    """Submitted again, as often as `retries` says."""
    CANCELLED = auto()
    """By a person: not submitted again."""


class Verdict(NamedTuple):
    """An outcome and, if it is no success, what happened: the end of a sentence that begins with the job."""

    outcome: Outcome
    message: str = ""


class JobStates:
    """The states of a run's jobs over time."""

    def __init__(self) -> None:
        self._leaving: dict[str, float] = {}
        self._missing: dict[str, float] = {}

    def judge(self, job: str, states: Mapping[str, str], now: float) -> Verdict:
        """What the latest answer of SLURM says of a job.

        Args:
            job: its number, `123` or, of an array, `123_4`.
            states: by job, as squeue or sacct show them; `123_[4-7]` stands for tasks that wait.
            now: seconds of a monotonic clock.
        """
        state = _state_of(job, states)
        if state is None:
            since = self._missing.setdefault(job, now)
            if now - since < FORGOTTEN_AFTER:
                return Verdict(Outcome.ACTIVE)
            return Verdict(
                Outcome.FAILED, f"has not been listed by SLURM for {now - since:.0f} s, so it counts as failed"
            )
        self._missing.pop(job, None)
        if state in PUT_BACK:
            if now - self._leaving.setdefault(job, now) < PUT_BACK_WITHIN:
                return Verdict(Outcome.ACTIVE)
            return Verdict(Outcome.FAILED, f"ended as {state} and was not put back into the queue")
        self._leaving.pop(job, None)
        if state == "COMPLETED":
            return Verdict(Outcome.SUCCEEDED)
        if state == "CANCELLED":
            return Verdict(Outcome.CANCELLED, "was cancelled, so the run ends; the same command continues it")
        if state in FAILED:
            return Verdict(Outcome.FAILED, f"ended as {state}")
        return Verdict(Outcome.ACTIVE)


def _state_of(job: str, states: Mapping[str, str]) -> str | None:
    """A job's state without who caused it (`CANCELLED by 1000`); None where it is not listed."""
    array = f"{job.partition('_')[0]}_["
    state = states.get(job) or next((state for name, state in states.items() if name.startswith(array)), None)
    return state.partition(" ")[0].rstrip("+") if state else None
