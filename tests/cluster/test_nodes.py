"""Updates over several nodes."""

import pytest
from machine import GO_ON

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_on_two_nodes_makes_the_policy_of_one_node_with_two_ranks(cluster, finished, stage) -> None:
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
    target = "results/mini/policies/00001"
    ranks = {"processes": 2, "zero_stage": stage}
    outcome = cluster.snakemake("--cores=2", "--sdm=apptainer", *GO_ON, "--", target, deepspeed=ranks)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    expected = cluster.files("policies/00001/*")
    cluster.finish(cluster.start(*GO_ON, "--force", "--", target, deepspeed={**ranks, "nodes": 2}))
    assert cluster.files("policies/00001/*") == expected
    log = (cluster.folder / "results/mini/logs/update/00001.log").read_text()
    assert "node1" in log
    assert "node2" in log
