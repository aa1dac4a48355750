"""Updates on several nodes."""

import pytest
from slurm_project import GO_ON

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "placement"), [(2, "job"), (3, "allocation")])
def test_an_update_on_two_nodes_makes_the_policy_of_one_node_with_two_ranks(
    cluster, finished, stage, placement
) -> None:
    """As a SLURM job of its own, and as a step in `rloo submit --nodes 2`."""
    cluster.at_round_1(finished, "policies/00001", "rounds/00001/metrics.json", "rounds/00001/train.parquet")
    target = "results/mini/policies/00001"
    ranks = {"processes": 2, "zero_stage": stage}
    outcome = cluster.snakemake("--cores=2", "--sdm=apptainer", *GO_ON, "--", target, deepspeed=ranks)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    expected = cluster.files("policies/00001/*")
    ranks["nodes"] = 2
    again = (*GO_ON, "--forcerun=update", "--", target)
    if placement == "job":
        cluster.finish(cluster.start(*again, deepspeed=ranks))
    else:
        job = cluster.submit("--nodes=2", "--time=10", "--", "--sdm=apptainer", *again, deepspeed=ranks)
        assert cluster.outcome(job)["outcome"] == "done"
    log = (cluster.folder / "results/mini/logs/update/00001.log").read_text()
    assert "2 ranks on node1, node2" in log
    assert cluster.files("policies/00001/*") == expected
