"""Interprets job states reported by SLURM. Depends neither on SLURM nor on Snakemake."""

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

PUT_BACK = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
"""States of jobs that SLURM requeues if the cluster and the job allow it."""
PUT_BACK_WITHIN = 5.0
"""Seconds after which a job that still shows one of these states counts as not requeued."""
BEYOND_LIMITS = re.compile(r"PartitionTimeLimit|MaxMemPerLimit|(?:QOS|Assoc)Max\w*PerJob\w*|QOSMin\w*")
"""Pending reasons of jobs that request more, or less, than partition, QOS or account allow."""
NOT_ALLOWED = re.compile(r"InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed")
"""Pending reasons of jobs whose account or QOS may not be used."""
BEYOND_LIMITS_FOR = 600.0
"""Seconds for which such a reason is tolerated, since someone may be changing the partition, and other jobs end."""
HELD_STATES = ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
HELD = re.compile(r"JobHeld\w*|JobHoldMaxRequeue|.*\bheld\b.*", re.IGNORECASE)
"""Pending reasons of jobs that wait until a person releases them, such as `launch failed requeued held`."""
LIMITED = re.compile(r"(?:QOS|Assoc)(?:Max|Grp(?!\w*Min))\w+")
"""Pending reasons of jobs that wait until others of their user, account or QOS end, or exceed such a limit alone."""
BUDGET = re.compile(r"(?:QOS|Assoc)Grp\w*Min\w*")
"""Pending reasons of jobs whose account has used up its hours."""
UNAVAILABLE = re.compile(r"BadConstraints|Partition(?:Config|Down|Inactive|NodeLimit)|ReqNodeNotAvail.*|Nodes .*")
"""Pending reasons of jobs that wait for nodes that are down or do not exist."""
PASSING = re.compile(rf"{LIMITED.pattern}|Nodes .*")
"""Pending reasons that often pass, so that they are only told after BEYOND_LIMITS_FOR."""
FAILED = {
    "DEADLINE": "",
    "FAILED": "",
    "OUT_OF_MEMORY": "; if no retry helps, set mem_mb of its rule under set-resources in the profile",
    "TIMEOUT": "; if no retry helps, set runtime of its rule under set-resources in the profile",
}
"""States of jobs that failed, with advice."""
FORGOTTEN_AFTER = 300.0
"""Seconds for which SLURM may fail to list a job. This exceeds the lag of an accounting database, and squeue shows
ended jobs for as long by default (MinJobAge).
"""
FORGOTTEN_WITHOUT_RECORDS = 3600.0
"""The same while accounting does not answer, and squeue forgets ended jobs sooner."""


class Outcome(Enum):
    """The outcome of a job that Snakemake is told."""

    ACTIVE = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    """Failed; submitted again up to `retries` times."""
    CANCELLED = auto()
    """Cancelled by a person; not submitted again."""
    NEVER = auto()
    """Would wait forever; to be cancelled and not submitted again."""


class Verdict(NamedTuple):
    """An outcome, with what happened or why the job waits, in words that follow the job's name."""

    outcome: Outcome
    message: str = ""


class JobStates:
    """Tracks the states of a run's jobs over time."""

    def __init__(self) -> None:
        self._leaving: dict[str, float] = {}
        self._missing: dict[str, float] = {}
        self._beyond: dict[tuple[str, bool], float] = {}
        self._told: set[tuple[str, str]] = set()

    def judge(self, job: str, states: Mapping[str, str], now: float, has_records: bool = True) -> Verdict:
        """Judges a job by SLURM's latest answer. The reason why it waits is given only once.

        Args:
            job: job id, `123` or, for an array task, `123_4`.
            states: states by job as shown by squeue (followed by the reason) or sacct; `123_[4-7]` stands for pending
                tasks.
            now: seconds of a monotonic clock.
            has_records: False if jobs that have ended may be missing from the answer.
        """
        state, reason = _state_of(job, states)
        if state is None:
            since = self._missing.setdefault(job, now)
            if now - since < (FORGOTTEN_AFTER if has_records else FORGOTTEN_WITHOUT_RECORDS):
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
        never = _never_starts(reason)
        beyond = job, bool(never)
        self._beyond.pop((job, not never), None)
        if state == "PENDING" and (never or PASSING.fullmatch(reason)):
            if now - self._beyond.setdefault(beyond, now) < BEYOND_LIMITS_FOR:
                return Verdict(Outcome.ACTIVE)
            if never:
                return Verdict(Outcome.NEVER, never)
        else:
            self._beyond.pop(beyond, None)
        if state in HELD_STATES or state == "PENDING":
            return Verdict(Outcome.ACTIVE, self._once(job, state, reason))
        if state == "COMPLETED":
            return Verdict(Outcome.SUCCEEDED)
        if state == "CANCELLED":
            return Verdict(Outcome.CANCELLED, "was cancelled, so the run ends; the same command continues it")
        if state in FAILED:
            return Verdict(Outcome.FAILED, f"ended as {state}{FAILED[state]}")
        return Verdict(Outcome.ACTIVE)

    def _once(self, job: str, state: str, reason: str) -> str:
        """Why a job waits, if a person has to know; empty after the first time, also of another task of its array."""
        why = _waits_for_a_person(job, state, reason)
        key = job.partition("_")[0], why
        if not why or key in self._told:
            return ""
        self._told.add(key)
        return why


def _never_starts(reason: str) -> str:
    """Why a job with this reason would wait forever; empty if it would not."""
    if BEYOND_LIMITS.fullmatch(reason):
        remedy = (
            "set runtime, mem_mb and gres of its rule under set-resources in the profile, or a limit for all jobs, as "
            "with `resources: {runtime: 60}`, and continue"
        )
        return f"requests what its partition, QOS or account does not allow ({reason}), so it was cancelled; {remedy}"
    if NOT_ALLOWED.fullmatch(reason):
        remedy = "set slurm_account or qos under default-resources in the profile, and continue"
        return f"may not use its account or QOS ({reason}), so it was cancelled; {remedy}"
    return ""


def _waits_for_a_person(job: str, state: str, reason: str) -> str:
    """Why a pending job may need a person's help; empty if it only waits for its turn."""
    if reason == "JobHeldAdmin":
        return f"is held by an administrator, who alone can release it (JobHeldAdmin); `scancel {job}` ends the run"
    if state in HELD_STATES or HELD.fullmatch(reason):
        why = reason if state == "PENDING" else state
        return f"is held ({why}): `scontrol release {job}` lets it start, `scancel {job}` ends the run"
    if BUDGET.fullmatch(reason):
        return f"waits because the account's hours are used up ({reason}): another account, or the next period, helps"
    if LIMITED.fullmatch(reason):
        remedy = "if no others run, set its resources, slurm_account or qos in the profile, and start the run again"
        return f"waits until other jobs of its user, account or QOS end ({reason}); {remedy}"
    if UNAVAILABLE.fullmatch(reason):
        return f"waits for nodes that are down or that the cluster does not have ({reason}); `sinfo -R` says more"
    return ""


def _state_of(job: str, states: Mapping[str, str]) -> tuple[str | None, str]:
    """A job's state without who caused it (`CANCELLED by 1000`), or None if it is not listed; and the reason after
    it.
    """
    array = f"{job.partition('_')[0]}_["
    text = states.get(job) or next((state for name, state in states.items() if name.startswith(array)), "")
    state, _, rest = text.partition(" ")
    return state.rstrip("+") or None, rest
