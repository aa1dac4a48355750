"""Interprets the states that SLURM shows for a job. Depends neither on SLURM nor on Snakemake."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

PUT_BACK = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
"""States of a job that SLURM puts back into the queue, where the cluster and the job allow it."""
PUT_BACK_WITHIN = 5.0
"""Seconds after which a job that still shows one of these states has not been put back."""
BEYOND_LIMITS = ("PartitionTimeLimit", "MaxMemPerLimit")
"""Reasons for which a job waits that asks for more than its partition allows, as a later attempt may. Others, such as
BadConstraints, may also come from nodes that are down for a while."""
BEYOND_LIMITS_FOR = 600.0
"""Seconds for which a job may show one of these reasons: a partition may be in the course of a change."""
FAILED = ("DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT")
FORGOTTEN_AFTER = 300.0
"""Seconds for which SLURM may not list a job. Longer than an accounting database lags, and squeue shows ended jobs for
this long by default (MinJobAge)."""


class Outcome(Enum):
    """Outcome of a job as told to Snakemake."""

    ACTIVE = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    """Submitted again, as often as `retries` says."""
    CANCELLED = auto()
    """Cancelled by a person; not submitted again."""
    NEVER = auto()
    """Would wait for ever: to be cancelled, and not submitted again."""


class Verdict(NamedTuple):
    """An outcome and, if not a success, its reason: the end of a sentence that begins with the job."""

    outcome: Outcome
    message: str = ""


class JobStates:
    """The states of a run's jobs over time."""

    def __init__(self) -> None:
        self._leaving: dict[str, float] = {}
        self._missing: dict[str, float] = {}
        self._beyond: dict[str, float] = {}

    def judge(self, job: str, states: Mapping[str, str], now: float) -> Verdict:
        """Judges a job by SLURM's latest answer.

        Args:
            job: its number, `123` or, of an array, `123_4`.
            states: by job, as squeue or sacct show them, of squeue with the reason behind the state; `123_[4-7]` stands
                for tasks that wait.
            now: seconds of a monotonic clock.
        """
        state, reason = _state_of(job, states)
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
        if state == "PENDING" and reason in BEYOND_LIMITS:
            if now - self._beyond.setdefault(job, now) < BEYOND_LIMITS_FOR:
                return Verdict(Outcome.ACTIVE)
            remedy = "set runtime and mem_mb of its rule under set-resources in the profile, and continue"
            return Verdict(
                Outcome.NEVER, f"asks for more than its partition allows ({reason}), so it was cancelled; {remedy}"
            )
        self._beyond.pop(job, None)
        if state == "COMPLETED":
            return Verdict(Outcome.SUCCEEDED)
        if state == "CANCELLED":
            return Verdict(Outcome.CANCELLED, "was cancelled, so the run ends; the same command continues it")
        if state in FAILED:
            return Verdict(Outcome.FAILED, f"ended as {state}")
        return Verdict(Outcome.ACTIVE)


def _state_of(job: str, states: Mapping[str, str]) -> tuple[str | None, str]:
    """A job's state without who caused it (`CANCELLED by 1000`), None where it is not listed, and what follows it."""
    array = f"{job.partition('_')[0]}_["
    text = states.get(job) or next((state for name, state in states.items() if name.startswith(array)), "")
    state, _, rest = text.partition(" ")
    return state.rstrip("+") or None, rest
