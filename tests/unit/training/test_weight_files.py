"""The weights that ranks write together are those that transformers saves."""

import json
import os
from pathlib import Path

import model_folders
import pytest
import torch
from safetensors.torch import load_file

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.model_files import INDEX, WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training import plain_model, retraining, weight_files


@pytest.fixture(params=["tied", *model_folders.KINDS])
def model(request, tmp_path, tiny_model):
    kind = request.param
    folder = tiny_model if kind == "tied" else model_folders.build(tmp_path / "model", 0, kind)
    return plain_model.load_plain(Policy(folder), "float32")


def test_weights_are_the_file_that_transformers_writes_or_several_with_the_same_tensors(
    tmp_path, model, monkeypatch
) -> None:
    model.save_pretrained(tmp_path / "plain")
    expected = load_file(tmp_path / "plain" / WEIGHTS)
    (tmp_path / "one").mkdir()
    weight_files.write_together(model, tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").iterdir()] == [WEIGHTS]
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "plain" / WEIGHTS).read_bytes()
    monkeypatch.setattr(weight_files, "SHARD", 20_000)
    (tmp_path / "several").mkdir()
    digests = weight_files.write_together(model, tmp_path / "several")
    found = {file.name: load_file(file) for file in (tmp_path / "several").glob("*.safetensors")}
    assert len(found) > 2
    assert digests == {name: manifest.digest(tmp_path / "several" / name) for name in found}
    index = json.loads((tmp_path / "several" / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, tensors in found.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    written = {name: tensor for tensors in found.values() for name, tensor in tensors.items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert retraining._distance(tmp_path / "several", tmp_path / "one") == 0
    assert not retraining._same(tmp_path / "several", tmp_path / "one")


def test_a_rename_that_nfs_repeats_after_it_succeeded_is_no_error(tmp_path, monkeypatch) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: [replace(source, target) for _ in range(2)])
    weight_files._write({"weight": torch.ones(1)}, tmp_path / WEIGHTS)
    assert [file.name for file in tmp_path.iterdir()] == [WEIGHTS]


def test_tensors_that_a_checkpoint_has_joined_are_in_one_file(tmp_path, tiny_model, monkeypatch) -> None:
    """Such as two tensors of the model that are one in the checkpoint: no file has its part of them."""
    model = plain_model.load_plain(Policy(tiny_model), "float32")
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]

    def joined(_: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {name: each for name, each in tensors.items() if name not in names}
        parts = [tensors[name] for name in names if name in tensors]
        return rest | ({"joined": torch.cat(parts)} if parts else {})

    monkeypatch.setattr(weight_files, "as_in_checkpoint", joined)
    monkeypatch.setattr(weight_files, "SHARD", 5_000)
    weight_files.write_together(model, tmp_path)
    assert [file.name for file in Path(tmp_path).glob("*.safetensors")] == [WEIGHTS]
    weights = dict(model.named_parameters())
    assert torch.equal(load_file(tmp_path / WEIGHTS)["joined"], torch.cat([weights[name] for name in names]))


def test_a_replay_without_a_step_is_the_policy_that_older_code_wrote_to_one_file(
    tmp_path, tiny_model, monkeypatch
) -> None:
    model = plain_model.load_plain(Policy(tiny_model), "float32")
    for name, size in (("one", 10**9), ("several", 20_000)):
        monkeypatch.setattr(weight_files, "SHARD", size)
        (tmp_path / name).mkdir()
        weight_files.write_together(model, tmp_path / name)
    retraining._compare(tmp_path / "several", tmp_path / "one", tmp_path / "one")
