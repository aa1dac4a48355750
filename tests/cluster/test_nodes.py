"""Updates on several nodes."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import Project
from slurm_project import GO_ON, Cluster

pytestmark = pytest.mark.slow
RANKS = {"processes": 2, "zero_stage": 3}
UPDATES = ("update", "update_last")
"""Rules of the two rounds' updates."""


@pytest.fixture(scope="session")
def of_one_node(slurm, image, finished, tmp_path_factory) -> Project:
    """Two rounds by two ranks of this machine in the image, under ZeRO 3; one pytest worker runs them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "of-one-node"
    with FileLock(shared / "of-one-node.lock"):
        if not folder.exists():
            first = Cluster(shared / "of-one-node.part")
            first.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
            arguments = ("--cores=2", "--sdm=apptainer", *GO_ON, "--", "results/mini/policies/00002")
            outcome = first.snakemake(*arguments, deepspeed=RANKS)
            assert outcome.returncode == 0, outcome.stdout + outcome.stderr
            first.folder.rename(folder)
    return Project(folder)


def test_updates_on_two_nodes_make_the_policies_of_one_node_with_two_ranks(cluster, of_one_node) -> None:
    """Each as a SLURM job of its own, the second from the state that the first has written."""
    expected = cluster.take(of_one_node).files("policies/*/*")
    again = (*GO_ON, "--forcerun", *UPDATES, "--allowed-rules", *UPDATES, "gate", "--", "results/mini/policies/00002")
    cluster.finish(cluster.start(*again, deepspeed=RANKS | {"nodes": 2}))
    assert all("2 ranks on node1, node2" in log(cluster, number) for number in ("00001", "00002"))
    assert cluster.files("policies/*/*") == expected


def test_ranks_and_policies_stay_on_the_nodes_of_a_job(cluster, of_one_node) -> None:
    """In `rloo submit --nodes 2`. srun is called for the two nodes and for the ranks. A policy that is not kept is
    copied from the node into the run's folder at the end, since it is asked for.
    """
    expected = cluster.take(of_one_node).files("policies/*/*")
    folder = cluster.folder / "results" / "mini" / "policies"
    shutil.rmtree(folder / "00001")
    shutil.rmtree(folder / "00002")
    updates = ("update_transient", "update_last")
    again = (*GO_ON, "--retries=0", "--forcerun", *updates, "--allowed-rules", *updates, "gate")
    targets = [f"results/mini/policies/{number:05d}" for number in (1, 2)]
    steps = cluster.count_steps()
    job = cluster.submit(
        *("--nodes=2", "--time=30", "--", "--sdm=apptainer", *again, "--", *targets),
        deepspeed=RANKS | {"nodes": 2},
        workers="always",
        keep_every=2,
        exchange="node",
    )
    assert cluster.outcome(job)["outcome"] == "done"
    assert "2 ranks on node1, node2" in log(cluster, "00001")
    assert len(steps.read_text().splitlines()) == 3
    assert "2 ranks on" not in log(cluster, "00002"), "they had met"
    assert cluster.files("policies/*/*") == expected
    assert not any(file.is_symlink() for file in folder.glob("*/*"))
    assert not list(Path("/dev/shm").glob("rloo-exchange-*"))


def log(cluster, number: str) -> str:
    return (cluster.folder / f"results/mini/logs/update/{number}.log").read_text()
