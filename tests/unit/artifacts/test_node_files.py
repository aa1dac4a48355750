"""Weights on a node's own disk: which of them stay, and when the disk is refused."""

from pathlib import Path

import pytest

from rloo_pipeline.artifacts import node_files
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import scratch


def test_a_node_keeps_the_weights_of_this_runs_policies_and_of_other_runs(tmp_path, monkeypatch) -> None:
    store, policies = tmp_path / "store", tmp_path / "run" / "policies"
    store.mkdir()
    monkeypatch.setenv(scratch.EXCHANGE, str(store))
    places = {name: node_files.place(policies / f".{name}.tmp") for name in ("00001", "00002", "00003")}
    other = node_files.place(tmp_path / "other" / "policies" / ".00001.tmp")
    for place in (*places.values(), other):
        assert place
        node_files.make(place, policies)
        (place / "model.safetensors").write_text("weights")
        if place == places["00001"]:  # the others belong to no policy, as after a kill
            (policies / "00001").mkdir(parents=True)
            (policies / "00001" / "model.safetensors").symlink_to(place / "model.safetensors")
    assert sorted(store.rglob("*.tmp")) == sorted([places["00001"], places["00003"], other])


def test_a_node_without_the_controllers_folder_is_refused(tmp_path, monkeypatch) -> None:
    assert node_files.place(tmp_path / "policies" / "00001") is None
    monkeypatch.setenv(scratch.EXCHANGE, str(tmp_path / "store"))
    place = node_files.place(tmp_path / "policies" / "00001")
    assert place
    with pytest.raises(UserError, match=r"store: this folder for policies \(exchange\) is missing on "):
        node_files.make(place, tmp_path / "policies")
    assert not Path(tmp_path / "store").exists()


def test_weights_that_a_user_linked_are_not_a_nodes(tmp_path) -> None:
    policy, blobs = tmp_path / "policies" / "00000", tmp_path / "hub" / "blobs"
    policy.mkdir(parents=True)
    (policy / "model.safetensors").symlink_to(blobs / "0123")
    (policy / "other.safetensors").symlink_to(tmp_path / "store" / "policies" / ".00000.tmp" / "other.safetensors")
    assert node_files.links(policy) == [policy / "other.safetensors"]
