"""Files of a copied run that `rloo adopt` accepts; tests/pipeline has whole runs."""

import pytest
from helpers import mini

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import adoption


def test_a_policy_that_was_lost_with_a_nodes_disk_is_left_to_the_next_call_and_a_damaged_one_is_refused(
    tmp_path,
) -> None:
    policy = tmp_path / "policies" / "00001"
    policy.mkdir(parents=True)
    weights = tmp_path / "node" / ".00001.tmp" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("weights")
    (policy / "model.safetensors").symlink_to(weights)
    manifest.write_manifest(policy, policy="00001")
    weights.unlink()
    adoption.check_files(tmp_path, Config(**mini()))
    weights.write_text("another")
    with pytest.raises(UserError, match=r"model\.safetensors was changed since it was written"):
        adoption.check_files(tmp_path, Config(**mini()))
