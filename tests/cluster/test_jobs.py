"""What SLURM does to the job of a stage, after which the run continues or ends with a clear line."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, STOP, mini
from slurm_project import GO_ON, SCORES, ask, wait_until

pytestmark = pytest.mark.slow

HUNGRY = '''
import functools, pathlib, time

@functools.cache
def eat():
    """Holds 3 GB, in the first attempt until SLURM has measured them."""
    mark = pathlib.Path({mark!r})
    first = not mark.exists()
    mark.touch()
    taken = bytearray(3 << 30)
    time.sleep(1200 if first else 0)

def hungry(completions, **_):
    eat()
    return [0.0] * len(completions)
'''


def test_a_cancelled_rollout_ends_the_run(cluster, finished) -> None:
    cluster.at_round_1(finished, "policies/00001", "rounds")
    started = cluster.start(*GO_ON, "--", "results/mini/policies/00001")
    job, _ = cluster.wait_for(started, "rollout")
    cluster.cancel(started, job, f"{job} (rollout)")


def test_a_cancelled_update_runs_again_and_one_whose_node_dies_runs_on_another(cluster, finished) -> None:
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
    arguments = (*GO_ON, "--set-resources", "update:slurm_partition=fragile", "--", "results/mini/policies/00001")
    started = cluster.start(*arguments)
    job, _ = cluster.wait_for(started, "update")
    cluster.cancel(started, job, f"{job} (update)")
    assert not (cluster.folder / "results/mini/policies/00001").exists()

    started = cluster.start(*arguments)
    try:
        job, node = cluster.wait_for(started, "update")
        kill_node(node, job)

        def runs_on_another_node() -> bool:
            running_job = cluster.running("update")
            return running_job is not None and running_job[1] != node

        wait_until(runs_on_another_node, "SLURM notices, and the update runs on another node")
        cluster.finish(started)
    finally:
        subprocess.run([ROOT / "tests" / "cluster" / "up.sh"], check=True)
    for pattern in ("policies/00001/*", "rounds/00001/*.parquet"):
        assert cluster.files(pattern) == finished.files(pattern)


def kill_node(name: str, job: str) -> None:
    """Like a loss of power: kills the daemon and everything that it started for the job."""
    daemon = int(Path(f"/run/slurm/slurmd.{name}.pid").read_text())
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{daemon}").exists(), "the daemon is gone")
    for mark, file in ((f"slurmstepd: [{job}.", "cmdline"), (f"SLURM_JOB_ID={job}\0", "environ")):
        for path in Path("/proc").glob(f"[0-9]*/{file}"):
            try:
                if mark.encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:  # it has ended, or belongs to someone else
                continue


@pytest.mark.parametrize("mode", ["requeued", "warned", "cancelled"])
def test_a_preempted_stage_runs_again(cluster, finished, mode) -> None:
    """A partition with PreemptMode=REQUEUE requeues the job, one with CANCEL does not. With a GraceTime, SIGTERM ends
    the stage before SLURM ends the job.
    """
    sizes = (f"score:slurm_partition={mode}", "score:mem_mb=150000")
    started = cluster.start_slow_score(finished, "--set-resources", *sizes)
    job, node = cluster.running("score")
    ask("sbatch", "--partition=cpu", f"--nodelist={node}", "--mem=150000", "--output=/dev/null", "--wrap=true")
    cluster.finish(started)
    assert (cluster.folder / SCORES).exists()
    restarted = "Restarts=1" in ask("scontrol", "show", "job", job)
    assert restarted == (mode != "cancelled")
    again = f"SLURM job {job} (score) ended as PREEMPTED and was not put back"
    assert (again in cluster.output()) == ("Trying to restart" in cluster.output()) == (mode == "cancelled")


def test_a_stage_that_runs_out_of_time_is_retried_with_more(cluster, finished) -> None:
    cluster.finish(cluster.start_slow_score(finished, "--set-resources", "score:runtime=attempt"))
    assert "TIMEOUT" in cluster.output()
    assert "runtime=2" in cluster.output()
    assert (cluster.folder / SCORES).exists()


def test_a_stage_that_runs_out_of_memory_is_retried_with_more(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores")
    (cluster.folder / "hungry.py").write_text(HUNGRY.format(mark=str(cluster.folder / "mark")))
    rewards = [*mini()["rewards"], {"function": "hungry.py:hungry", "weight": 0, "timeout": 1200}]
    started = cluster.start(*GO_ON, "--set-resources", "score:mem_mb=2500*attempt", "--", SCORES, rewards=rewards)
    cluster.finish(started)
    assert "exceeded memory limit" in cluster.logs()
    assert "mem_mb=5000" in cluster.output()
    assert (cluster.folder / SCORES).exists()


def test_a_gate_ends_a_run_and_the_same_command_then_writes_its_report(cluster, finished) -> None:
    """A finished run of two rounds is extended by a third one, which the gate does not allow to start."""
    cluster.take(finished, "report.html")
    cluster.finish(cluster.start(*GO_ON, rounds=3, gates=STOP))
    output = cluster.output()
    assert "ended after round 2 of 3" in output
    assert re.search(r"Job \d+ has been submitted with SLURM jobid \d+ \(log: \S*/rule_report/", output)
    run = cluster.folder / "results" / "mini"
    assert json.loads((run / "stopped.json").read_text())["round"] == 2
    assert (run / "report.html").exists()
    assert not (run / "rounds" / "00003").exists()
