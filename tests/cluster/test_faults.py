"""What goes wrong on a cluster, and that the run goes on to the same bytes."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, mini
from machine import GO_ON, ask, wait_until

pytestmark = pytest.mark.slow

SLOW_ONCE = '''
import pathlib, time

def slow_once(completions, **_):
    """Far too long, the first time that it is called."""
    mark = pathlib.Path({mark!r})
    if not mark.exists():
        mark.touch()
        time.sleep(600)
    return [0.0] * len(completions)
'''
HUNGRY = '''
import functools, time

@functools.cache
def eat():
    """3 GB for long enough to be seen."""
    taken = bytearray(3 << 30)
    time.sleep(15)

def hungry(completions, **_):
    eat()
    return [0.0] * len(completions)
'''
SLOW_FIRST = '''
import pathlib, time

def slow_first(completions, **_):
    """Whoever calls it first waits to be told to go on."""
    folder = pathlib.Path({folder!r})
    try:
        (folder / "at work").touch(exist_ok=False)
    except FileExistsError:
        return [0.0] * len(completions)
    while not (folder / "go on").exists():
        time.sleep(0.5)
    return [0.0] * len(completions)
'''


def test_a_cancelled_job_ends_the_run_and_a_stage_whose_node_dies_runs_on_another(cluster, finished) -> None:
    cluster.at_round_1(finished, "policies/00001", "rounds")
    target = (*GO_ON, "--", "results/mini/policies/00001")
    started = cluster.start(*target)
    job, _ = cluster.wait_for(started, "rollout")
    ask("scancel", job)
    assert started.wait(300) == 1
    assert f"SLURM job {job} (rollout) was cancelled" in cluster.said()
    assert "Trying to restart" not in cluster.said()

    started = cluster.start(*target)
    try:
        job, node = cluster.wait_for(started, "update")
        kill_node(node, job)

        def elsewhere() -> bool:
            found = cluster.running("update")
            return found is not None and found[1] != node

        wait_until(elsewhere, 180, "SLURM notices, and the update runs on another node")
        cluster.finish(started)
    finally:
        subprocess.run([ROOT / "tests" / "cluster" / "up.sh"], check=True)
    for pattern in ("policies/00001/*", "rounds/00001/*/*"):
        assert cluster.files(pattern) == finished.files(pattern)


def kill_node(name: str, job: str) -> None:
    """As if it lost its power: the daemon, and all that it had started for the job."""
    daemon = int(Path(f"/run/slurm/slurmd.{name}.pid").read_text())
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{daemon}").exists(), 10, "the daemon is gone")
    for mark, file in ((f"slurmstepd: [{job}.", "cmdline"), (f"SLURM_JOB_ID={job}\0", "environ")):
        for path in Path("/proc").glob(f"[0-9]*/{file}"):
            try:
                if mark.encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:  # it has ended, or belongs to someone else
                continue


def test_a_stage_that_runs_out_of_time_gets_more(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores")
    (cluster.folder / "slow.py").write_text(SLOW_ONCE.format(mark=str(cluster.folder / "mark")))
    rewards = [*mini()["rewards"], {"function": "slow.py:slow_once", "weight": 0}]
    scores = "results/mini/rounds/00001/scores/000.parquet"
    started = cluster.start(*GO_ON, "--set-resources", "score:runtime=attempt", "--", scores, rewards=rewards)
    cluster.finish(started)
    assert "TIMEOUT" in cluster.said()
    assert "runtime=2" in cluster.said()
    assert (cluster.folder / scores).exists()


def test_a_stage_that_runs_out_of_memory_gets_more(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores")
    (cluster.folder / "hungry.py").write_text(HUNGRY)
    rewards = [*mini()["rewards"], {"function": "hungry.py:hungry", "weight": 0}]
    scores = "results/mini/rounds/00001/scores/000.parquet"
    started = cluster.start(*GO_ON, "--set-resources", "score:mem_mb=2500*attempt", "--", scores, rewards=rewards)
    cluster.finish(started)
    assert "exceeded memory limit" in cluster.logs()
    assert "mem_mb=5000" in cluster.said()
    assert (cluster.folder / scores).exists()


def test_a_node_that_does_not_see_the_image_says_so(cluster, finished) -> None:
    """The image goes while the run is under way."""
    cluster.at_round_1(finished, "policies/00001", "rounds", "logs")
    started = cluster.start(*GO_ON, "--retries=0", "--", "results/mini/policies/00001")
    cluster.wait_for(started, "rollout")
    logs = cluster.folder / "results" / "mini" / "logs" / "rollout"
    wait_until(lambda: list(logs.glob("*.log")), 60, "a rollout is in the image")
    (cluster.folder / "images").unlink()
    assert started.wait(300) == 1
    assert "no such image on" in cluster.logs()


def test_of_a_controller_killed_and_started_again_the_older_jobs_lose(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores/000.parquet")
    (cluster.folder / "slow.py").write_text(SLOW_FIRST.format(folder=str(cluster.folder)))
    rewards = [*mini()["rewards"], {"function": "slow.py:slow_first", "weight": 0, "timeout": 600}]
    scores = "results/mini/rounds/00001/scores/000.parquet"
    started = cluster.start(*GO_ON, "--", scores, rewards=rewards)
    wait_until((cluster.folder / "at work").exists, 120, "the job is at work")
    orphan, _ = cluster.running("score")
    started.kill()
    started.wait()
    again = cluster.start(*GO_ON, "--", scores, rewards=rewards, end=False)
    cluster.finish(again)
    assert "cleared the lock of a killed run" in cluster.said()
    assert cluster.holds(orphan), "the older job is still at work"
    written = (cluster.folder / scores).stat()
    (cluster.folder / "go on").touch()
    wait_until(lambda: "RUNNING" not in ask("scontrol", "show", "job", orphan), 120, "the older job ends")
    assert (cluster.folder / scores).stat() == written
    assert "JobState=FAILED" in ask("scontrol", "show", "job", orphan)
    assert "was started again" in cluster.logs()
