"""The example of limits by which the SLURM plugin chooses partitions."""

from types import SimpleNamespace

import pytest
from helpers import ROOT
from snakemake_executor_plugin_slurm import partitions


@pytest.mark.parametrize(
    ("minutes", "gpus", "chosen"),
    [(60, 0, "cpu"), (120, 1, "gpu-preemptible"), (240, 1, "gpu")],
    ids=["scores", "a rollout", "an update, or a rollout again"],
)
def test_each_stage_goes_where_the_example_says(minutes, gpus, chosen) -> None:
    listed = partitions.read_partition_file(ROOT / "profiles" / "slurm" / "partitions.yaml")
    requested = {"runtime": minutes, "mem_mb": 8000} | ({"gres": f"gpu:{gpus}"} if gpus else {})
    job = SimpleNamespace(name="stage", threads=1, resources=requested)
    logger = SimpleNamespace(debug=print, info=print, warning=print)
    assert partitions.get_best_partition(listed, job, logger) == chosen
