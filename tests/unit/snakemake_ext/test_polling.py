"""How often SLURM is asked, and what becomes of a job that was preempted for good."""

import asyncio
from types import SimpleNamespace

import pytest

from rloo_pipeline.snakemake_ext import polling


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Seconds as the test sets them."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(polling.time, "monotonic", lambda: clock.now)
    return clock


def test_the_next_question_comes_after_a_tenth_of_the_time_since_a_job_ended(clock) -> None:
    async def check(_, jobs):
        for job in jobs:
            if job != "ended":
                yield job

    check = polling._often(check)
    executor = SimpleNamespace(
        workflow=SimpleNamespace(executor_settings=SimpleNamespace(init_seconds_before_status_checks=10))
    )

    async def seconds(*jobs) -> float:
        assert [job async for job in check(executor, list(jobs))] == [job for job in jobs if job != "ended"]
        return executor.next_seconds_between_status_checks

    for later, jobs, expected in [(0, ["a"], 10), (300, ["a"], 30), (3000, ["a"], 60), (0, ["a", "ended"], 10)]:
        clock.now += later
        assert asyncio.run(seconds(*jobs)) == expected


def test_a_cancelled_job_is_one_whoever_cancelled_it(clock) -> None:
    async def query(*_):
        return {"1": "CANCELLED by 1000", "2": "RUNNING"}, 0.1

    answer = asyncio.run(polling._with_an_end(query, print)("sacct", None))
    assert answer == ({"1": "CANCELLED", "2": "RUNNING"}, 0.1)


def test_a_job_that_stays_preempted_counts_as_failed_and_is_told_of_once(clock) -> None:
    answers = [{"1": "PREEMPTED"}, {"1": "PENDING"}, {"1": "PREEMPTED"}, {"1": "PREEMPTED"}, {"1": "PREEMPTED"}]

    async def query(*_):
        return answers.pop(0), 0.1

    told: list[str] = []
    query = polling._with_an_end(query, told.append)
    states = []
    for _ in range(5):
        clock.now += 10
        states.append(asyncio.run(query("squeue", None))[0]["1"])
    assert states == ["PREEMPTED", "PENDING", "PREEMPTED", "FAILED", "FAILED"]
    assert len(told) == 1
