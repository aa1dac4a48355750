"""Shards in parallel: as tasks of an array job, and as steps on the nodes of one job; ranks that do not meet."""

import re

import pytest
from helpers import mini
from slurm_project import GO_ON, ask

pytestmark = pytest.mark.slow

SCORES = [f"results/mini/rounds/00001/scores/{shard}.parquet" for shard in ("000", "001")]
FAILS_ONCE = '''
import os, pathlib

def fails_once(completions, **_):
    """The first call fails."""
    try:
        pathlib.Path({mark!r}).touch(exist_ok=False)
    except FileExistsError:
        return [0.0] * len(completions)
    raise ValueError("for the first time")
'''
ABSENT = """
import os, time

if os.environ.get("SLURM_PROCID") == "1":
    time.sleep(600)
"""


def test_shards_are_tasks_of_one_array_and_a_failed_one_is_retried_as_a_job(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores")
    (cluster.folder / "fails.py").write_text(FAILS_ONCE.format(mark=str(cluster.folder / "mark")))
    rewards = [*mini()["rewards"], {"function": "fails.py:fails_once", "weight": 0, "timeout": 600}]
    arguments = ("--set-resources", "score:slurm_partition=gpu", "--", *SCORES)
    cluster.finish(cluster.start(*GO_ON, *arguments, rewards=rewards))
    output = cluster.output()
    array = re.search(r"submitted as SLURM array (\d+)_\[1-2\]", output)
    assert array, output
    listed = ask("squeue", "-h", "-r", "-t", "all", "-o", "%i %P %T").splitlines()
    tasks = {line for line in listed if line.startswith(f"{array[1]}_")}
    assert tasks in (
        {f"{array[1]}_1 gpu FAILED", f"{array[1]}_2 gpu COMPLETED"},
        {f"{array[1]}_1 gpu COMPLETED", f"{array[1]}_2 gpu FAILED"},
    )
    assert "for the first time" in output, "the log of the task that failed is shown"
    assert output.count("Trying to restart") == 1
    assert all((cluster.folder / path).exists() for path in SCORES)


def test_cancelling_a_pending_array_ends_the_run(cluster, finished) -> None:
    cluster.at_round_1(finished, "rounds/00001/scores")
    later = ("--set-resources", "score:slurm_extra='--begin=now+900'")
    started = cluster.start(*GO_ON, *later, "--", *SCORES)
    array = cluster.waiting_array(started)
    cluster.cancel(started, array, f"{array}_2 (score)")


def test_shards_of_a_job_of_two_nodes_run_on_both(cluster, finished) -> None:
    cluster.at_round_1(finished, "policies/00001", "rounds", "logs")
    job = cluster.submit("--nodes=2", "--time=20", "--", "--sdm=apptainer", "--retries=0", *GO_ON, "--", *SCORES)
    assert cluster.outcome(job)["outcome"] == "done"
    logs = [cluster.folder / f"results/mini/logs/rollout/00001-{shard}.log" for shard in ("000", "001")]
    places = {re.search(r"^node: ([^\s,]+)", log.read_text(), re.MULTILINE)[1] for log in logs}
    assert len(places) == 2
    for pattern in ("rounds/00001/rollouts/*", "rounds/00001/scores/*"):
        assert cluster.files(pattern) == finished.files(pattern)


def test_the_nodes_of_a_job_keep_their_engines_between_rounds(cluster, finished) -> None:
    """Updates run on one node, whose trainer has made the policy before.
    srun is called for the nodes, not for stages.
    """
    cluster.at_round_1(finished, "policies/00001", "rounds", "logs")
    target = ("--retries=0", *GO_ON, "--", "results/mini/policies/00002")
    steps = cluster.count_steps()
    job = cluster.submit("--nodes=2", "--time=30", "--", "--sdm=apptainer", *target, workers="always")
    assert cluster.outcome(job)["outcome"] == "done"
    assert len(steps.read_text().splitlines()) == 2
    logs = cluster.folder / "results/mini/logs/workers"
    done = [line.split()[1] for log in logs.glob("*/*.log") for line in log.read_text().splitlines() if ": 0" in line]
    assert [done.count(stage) for stage in ("rollout", "reference", "update")] == [4, 4, 2]
    assert len(list(logs.glob("*/trainer-0.log"))) == 1
    assert len([log for log in logs.glob("*/sampler-0.log") if log.read_text()]) == 2
    for pattern in ("rounds/*/rollouts/*", "rounds/*/train.parquet", "policies/*/*"):
        assert cluster.files(pattern) == finished.files(pattern)


def test_a_missing_rank_is_named(cluster, finished) -> None:
    """With less patience than the default of five minutes."""
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
    (cluster.folder / "sitecustomize.py").write_text(ABSENT)
    nodes = cluster.folder / "rloo_pipeline" / "cluster" / "nodes.py"
    nodes.write_text(nodes.read_text().replace("PATIENCE = 300.0", "PATIENCE = 10.0"))
    target = ("--retries=0", *GO_ON, "--", "results/mini/policies/00001")
    job = cluster.submit("--nodes=2", "--time=10", "--", *target, deepspeed={"processes": 2, "nodes": 2})
    assert cluster.outcome(job)["outcome"] == "failed"
    log = (cluster.folder / "results/mini/logs/update/00001.log").read_text()
    assert re.search(r"the 2 ranks did not meet within 10 s .*no sign of rank 1.*nodes: \S*node", log)
