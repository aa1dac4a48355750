"""Updates on several nodes."""

import shutil
from pathlib import Path

import pytest
from slurm_project import GO_ON

pytestmark = pytest.mark.slow


def test_an_update_on_two_nodes_makes_the_policy_of_one_node_with_two_ranks(cluster, finished) -> None:
    """As a SLURM job of its own."""
    expected = on_one_node(cluster, finished, "00001", stage=2)
    again = (*GO_ON, "--forcerun=update", "--", "results/mini/policies/00001")
    cluster.finish(cluster.start(*again, deepspeed=RANKS | {"zero_stage": 2, "nodes": 2}))
    assert "2 ranks on node1, node2" in log(cluster, "00001")
    assert cluster.files("policies/00001/*") == expected


def test_ranks_on_the_nodes_of_a_job_stay_between_two_updates(cluster, finished) -> None:
    """In `rloo submit --nodes 2`. srun is called for the two nodes and for the ranks."""
    expected = on_one_node(cluster, finished, "00002", stage=3)
    updates = ("update", "update_last")
    again = (*GO_ON, "--retries=0", "--forcerun", *updates, "--allowed-rules", *updates, "gate")
    steps = cluster.count_steps()
    job = cluster.submit(
        *("--nodes=2", "--time=10", "--", "--sdm=apptainer", *again, "--", "results/mini/policies/00002"),
        deepspeed=RANKS | {"zero_stage": 3, "nodes": 2},
        workers="always",
    )
    assert cluster.outcome(job)["outcome"] == "done"
    assert "2 ranks on node1, node2" in log(cluster, "00001")
    assert len(steps.read_text().splitlines()) == 3
    assert "2 ranks on" not in log(cluster, "00002"), "they had met"
    assert cluster.files("policies/*/*") == expected


RANKS = {"processes": 2}


def on_one_node(cluster, finished, last: str, stage: int) -> dict[str, bytes]:
    """The policies up to round `last`, by two ranks of this machine."""
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
    target = f"results/mini/policies/{last}"
    outcome = cluster.snakemake(
        "--cores=2", "--sdm=apptainer", *GO_ON, "--", target, deepspeed=RANKS | {"zero_stage": stage}
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return cluster.files("policies/*/*" if last != "00001" else "policies/00001/*")


def log(cluster, number: str) -> str:
    return (cluster.folder / f"results/mini/logs/update/{number}.log").read_text()


def test_policies_that_stay_on_two_nodes_are_those_of_one_node(cluster, finished) -> None:
    """A policy that is not kept is copied from the node into the run's folder at the end, since it is asked for."""
    expected = on_one_node(cluster, finished, "00002", stage=2)
    folder = cluster.folder / "results" / "mini" / "policies"
    shutil.rmtree(folder / "00001")
    shutil.rmtree(folder / "00002")
    updates = ("update_transient", "update_last")
    again = (*GO_ON, "--retries=0", "--forcerun", *updates, "--allowed-rules", *updates, "gate")
    targets = [f"results/mini/policies/{number:05d}" for number in (1, 2)]
    job = cluster.submit(
        *("--nodes=2", "--time=10", "--", "--sdm=apptainer", *again, "--", *targets),
        deepspeed=RANKS | {"zero_stage": 2, "nodes": 2},
        workers="always",
        keep_every=2,
        exchange="node",
    )
    assert cluster.outcome(job)["outcome"] == "done"
    assert "2 ranks on node1, node2" in log(cluster, "00001")
    assert cluster.files("policies/*/*") == expected
    assert not any(file.is_symlink() for file in folder.glob("*/*"))
    assert not list(Path("/dev/shm").glob("rloo-exchange-*"))
