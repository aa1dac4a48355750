"""Reward functions' processes that are started ahead of a stage are those that the stage would start itself."""

import os
from pathlib import Path

import pytest
from helpers import mini

from rloo_pipeline import kept
from rloo_pipeline.config_file import validate
from rloo_pipeline.rewards import ahead
from rloo_pipeline.rewards.pool import Worker
from rloo_pipeline.rewards.schedule import Crews
from rloo_pipeline.rewards.scoring import Batch, score_with

COUNTING = """
import os
calls = 0

def counted(completions):
    global calls
    calls += 1
    print("scoring as", os.getpid(), flush=True)
    return [float(calls)] * len(completions)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """In a process that keeps things, until the test is over."""
    monkeypatch.setattr(kept, "_on", True)
    file = tmp_path / "mine.py"
    file.write_text(COUNTING)
    rewards = [{"function": f"{file}:counted", "name": "answer"}, {"function": f"{file}:counted", "name": "worked"}]
    yield validate(mini(rewards=rewards, scoring={"workers": 1}), "mini")
    kept.catch_up()
    if left := kept.take(ahead.NAME, None):
        left.end()


def stage(config) -> tuple[list[float | None], list[int]]:
    """The scores of a stage, and the processes that gave them."""
    with ahead.crews(config, config.rewards) as crews:
        who = processes(crews)
        found, other = score_with(crews, Batch(["p"] * 4, ["c"] * 4, None, {}), [2, 2])
    assert found.scores == other.scores
    ahead.start_next(config, config.rewards, crews.paces)
    return found.scores, who


def processes(crews: Crews) -> list[int]:
    return [worker.process.pid for crew in crews.started for worker in crew]


def waiting() -> list[int]:
    """The processes that were started ahead; they stay so."""
    kept.catch_up()
    thing = kept.take(ahead.NAME, None)
    kept.keep(ahead.NAME, None, thing)
    return processes(thing)


def test_a_stage_finds_the_processes_started_ahead_and_none_that_was_called(config) -> None:
    first, used = stage(config)
    for _ in range(2):
        ready = waiting()
        assert not set(ready) & set(used)
        again, used = stage(config)
        assert used == ready
        assert again == first == [1, 1, 2, 2]


def test_a_function_whose_pace_is_known_gets_all_its_short_calls_at_once(config, monkeypatch) -> None:
    handed: list[int] = []
    give = Worker.give
    monkeypatch.setattr(Worker, "give", lambda self, work: (handed.append(len(work.counts)), give(self, work))[1])

    def scored() -> list[list[float | None]]:
        with ahead.crews(config, config.rewards[:1]) as crews:
            found = score_with(crews, Batch(["p"] * 40, ["c"] * 40, None, {}), [2] * 20)
        ahead.start_next(config, config.rewards[:1], crews.paces)
        kept.catch_up()
        return [one.scores for one in found]

    first = scored()
    assert handed[0] == 1
    handed.clear()
    assert scored() == first
    assert handed == [20]


def test_a_changed_function_and_a_dead_process_are_not_used(config) -> None:
    stage(config)
    old = waiting()
    file = Path(config.rewards[0].function.rpartition(":")[0])
    file.write_text(COUNTING.replace("float(calls)", "-1.0"))
    scores, used = stage(config)
    assert scores == [-1] * 4
    assert used != old
    pid, _ = waiting()
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    scores, used = stage(config)
    assert scores == [-1] * 4
    assert pid not in used


def test_what_a_function_prints_goes_where_its_stage_writes(config, capfd) -> None:
    stage(config)
    pid, _ = waiting()
    capfd.readouterr()
    keep = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    stage(config)
    os.dup2(keep, 2)
    for end in (write, keep):
        os.close(end)
    with os.fdopen(read) as said:
        assert f"scoring as {pid}" in said.readline()
    assert f"scoring as {pid}" not in capfd.readouterr().err
