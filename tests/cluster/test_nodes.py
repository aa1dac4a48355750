"""Updates on several nodes."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import Project
from slurm_project import GO_ON, Cluster

pytestmark = pytest.mark.slow
RANKS = {"processes": 2}
UPDATES = ("update", "update_last")
"""Rules of the two rounds' updates."""


@pytest.fixture(scope="session")
def of_one_node(slurm, image, finished, tmp_path_factory) -> Project:
    """Two rounds by two ranks of this machine in the image, under ZeRO 2; one pytest worker runs them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "of-one-node"
    with FileLock(shared / "of-one-node.lock"):
        if not folder.exists():
            first = Cluster(shared / "of-one-node.part")
            train(first, finished, 2, "--sdm=apptainer")
            first.folder.rename(folder)
    return Project(folder)


def train(project: Cluster, finished: Project, stage: int, *options: str) -> None:
    """Makes policies 1 and 2 by two ranks of this machine."""
    project.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
    arguments = ("--cores=2", *options, *GO_ON, "--", "results/mini/policies/00002")
    outcome = project.snakemake(*arguments, deepspeed=RANKS | {"zero_stage": stage})
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_updates_on_two_nodes_make_the_policies_of_one_node_with_two_ranks(cluster, of_one_node) -> None:
    """Each as a SLURM job of its own, the second from the state that the first has written."""
    expected = cluster.take(of_one_node).files("policies/*/*")
    again = (*GO_ON, "--forcerun", *UPDATES, "--allowed-rules", *UPDATES, "gate", "--", "results/mini/policies/00002")
    cluster.finish(cluster.start(*again, deepspeed=RANKS | {"zero_stage": 2, "nodes": 2}))
    assert all("2 ranks on node1, node2" in log(cluster, number) for number in ("00001", "00002"))
    assert cluster.files("policies/*/*") == expected


def test_ranks_on_the_nodes_of_a_job_stay_between_two_updates(cluster, finished) -> None:
    """In `rloo submit --nodes 2`. srun is called for the two nodes and for the ranks. The image, which the expected
    policies are made without, changes no bytes (test_runs.py).
    """
    train(cluster, finished, 3)
    expected = cluster.files("policies/*/*")
    again = (*GO_ON, "--retries=0", "--forcerun", *UPDATES, "--allowed-rules", *UPDATES, "gate")
    steps = cluster.count_steps()
    job = cluster.submit(
        *("--nodes=2", "--time=30", "--", "--sdm=apptainer", *again, "--", "results/mini/policies/00002"),
        deepspeed=RANKS | {"zero_stage": 3, "nodes": 2},
        workers="always",
    )
    assert cluster.outcome(job)["outcome"] == "done"
    assert "2 ranks on node1, node2" in log(cluster, "00001")
    assert len(steps.read_text().splitlines()) == 3
    assert "2 ranks on" not in log(cluster, "00002"), "they had met"
    assert cluster.files("policies/*/*") == expected


def log(cluster, number: str) -> str:
    return (cluster.folder / f"results/mini/logs/update/{number}.log").read_text()


def test_policies_that_stay_on_two_nodes_are_those_of_one_node(cluster, of_one_node) -> None:
    """A policy that is not kept is copied from the node into the run's folder at the end, since it is asked for."""
    expected = cluster.take(of_one_node).files("policies/*/*")
    folder = cluster.folder / "results" / "mini" / "policies"
    shutil.rmtree(folder / "00001")
    shutil.rmtree(folder / "00002")
    updates = ("update_transient", "update_last")
    again = (*GO_ON, "--retries=0", "--forcerun", *updates, "--allowed-rules", *updates, "gate")
    targets = [f"results/mini/policies/{number:05d}" for number in (1, 2)]
    job = cluster.submit(
        *("--nodes=2", "--time=30", "--", "--sdm=apptainer", *again, "--", *targets),
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
