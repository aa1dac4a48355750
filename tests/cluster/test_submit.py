"""A run that is one SLURM job and continues after its time limit, and a controller that does."""

import json

import pytest
from helpers import mini
from slurm_project import GO_ON, ask, wait_until

pytestmark = pytest.mark.slow

IN_IMAGE = ("--", "--sdm", "apptainer", *GO_ON)
IS_STOPPING = "grep -qs 'no more stages are started' results/mini/logs/submit/*.out"
"""Succeeds once the job of the run says that its time is running out."""
UNTIL_STOPPED = f"""
import subprocess, time

def until_stopped(completions, **_):
    while subprocess.run({IS_STOPPING!r}, shell=True, cwd=FOLDER).returncode:
        time.sleep(1)
    return [0.0] * len(completions)
"""
QUICK = ("--seconds-between-status-checks=2", "--rloo-slurm-init-seconds-before-status-checks=1")


def test_a_run_in_several_allocations_gives_the_bytes_of_a_run_in_one(cluster, finished) -> None:
    cluster.at_round_1(finished)
    before(cluster, "score", f"until {IS_STOPPING}; do sleep 1; done")
    # a minute and a half for starting stages, after which the scores begin
    arguments = (*IN_IMAGE, "--", "results/mini/policies/00002")
    job = cluster.submit("--time=5", "--stop-before=3.5", "--cpus-per-node=2", *arguments)
    printed = cluster.rloo("status", "mini").stdout
    assert f"mini: job {job} " in printed
    assert "rounds done: 1 of 2" in printed
    again = cluster.rloo("submit", "config/test.yaml", "--time=2")
    assert f"job {job} is already in the queue" in again.stderr
    outcome = cluster.outcome(job)
    assert outcome["outcome"] == "done"
    assert outcome["allocations"] >= 2
    for pattern in ("policies/*/*", "rounds/**/*.parquet"):
        assert cluster.files(pattern) == finished.files(pattern)
    wait_until(lambda: f"mini: done in allocation {outcome['allocations']}" in status(cluster), "the job has ended")


def test_a_controller_continues_after_its_time_limit_and_cancels_its_stages_when_cancelled(cluster, finished) -> None:
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/scores", "rounds/00001/metrics.json")
    (cluster.folder / "slow.py").write_text(f"FOLDER = {str(cluster.folder)!r}\n{UNTIL_STOPPED}")
    rewards = [*mini()["rewards"], {"function": "slow.py:until_stopped", "weight": 0, "timeout": 600}]
    arguments = (*IN_IMAGE, *QUICK)
    # a minute and a half for starting stages, after which the scores are done
    target = ("results/mini/policies/00001", "results/mini/assets")
    job = cluster.submit("--controller", "--time=5", "--stop-before=3.5", *arguments, *target, rewards=rewards)
    outcome = cluster.outcome(job)
    assert outcome["outcome"] == "done"
    assert outcome["allocations"] >= 2
    weights = "policies/00001/*.safetensors"
    assert cluster.files(weights) == finished.files(weights) != {}

    wait_until(lambda: not ask("squeue", "-h", "-o", "%A", "--job", job).strip(), "the job has ended")
    before(cluster, "rollout", "sleep 600")
    cluster.submit("--controller", "--time=5", *arguments, "--until", "rollout")
    stage, _ = wait_until(lambda: cluster.running("rollout"), "a rollout runs")
    cancelled = cluster.rloo("cancel", "mini")
    assert "was cancelled" in cancelled.stdout, cancelled.stderr
    wait_until(lambda: "JobState=CANCELLED" in ask("scontrol", "show", "job", stage), "the rollout is cancelled")
    outcome_file = cluster.folder / "results" / "mini" / "logs" / "submit" / "outcome.json"
    assert json.loads(outcome_file.read_text())["outcome"] == "cancelled"
    assert "mini: cancelled in allocation 1 of job" in status(cluster)


def test_an_allocation_that_finishes_no_stage_is_not_requeued(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores")
    (cluster.folder / "slow.py").write_text("def slow(completions, **_):\n    import time\n    time.sleep(900)\n")
    job = cluster.submit(
        *("--time=1", "--stop-before=0.6", "--cpus-per-node=2"),
        *("--", *GO_ON, "--retries=0", "results/mini/rounds/00001/scores/000.parquet"),
        rewards=[*mini()["rewards"], {"function": "slow.py:slow", "timeout": 1000, "weight": 0}],
    )
    outcome = cluster.outcome(job)
    assert outcome["outcome"] == "failed"
    assert "longer --time" in outcome["why"]


def before(cluster, stage: str, command: str) -> None:
    """Has the jobs of a stage run another command first."""
    rules = cluster.folder / "workflow" / "rules" / "rounds.smk"
    text, call = rules.read_text(), f'"rloo {stage} --prompts'
    assert call in text
    rules.write_text(text.replace(call, f'"{command}; rloo {stage} --prompts'))


def status(cluster) -> str:
    return cluster.rloo("status").stdout
