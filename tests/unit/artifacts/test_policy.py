"""A policy is unchanged since a stage wrote it, and of the round in its name; a model has finite weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rloo_pipeline.artifacts import policy
from rloo_pipeline.errors import UserError


@pytest.fixture
def folder(tmp_path) -> Path:
    """Policy 3 of a run."""
    folder = tmp_path / "policies" / "00003"
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(4, 4)}, folder / policy.WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16}))
    (folder / "tokenizer.json").write_text("{}")
    policy.seal(folder, "00003")
    return folder


def test_the_digest_of_a_policy_is_that_of_its_files_wherever_they_are(folder, tmp_path) -> None:
    renamed = folder.rename(tmp_path / "model")
    assert policy.digest(renamed) == policy.seal(renamed, "00003")
    renamed_back = renamed.rename(folder)
    assert policy.digest(renamed_back) == policy.seal(renamed_back, "00003")
    (renamed_back / "tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer\.json was changed"):
        policy.verify_text(renamed_back)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: save_file({"weight": torch.zeros(4, 4)}, folder / policy.WEIGHTS), "safetensors was changed"),
        (lambda folder: (folder / policy.WEIGHTS).unlink(), "safetensors is missing"),
        (lambda folder: (folder / "more.safetensors").touch(), "more.safetensors was not written by this run"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json: has no digest"),
        (lambda folder: (folder / "manifest.json").unlink(), "00003: has no manifest.json"),
        (lambda folder: policy.seal(folder, "00002"), "00003: its policy is 00002, and 00003 belongs here"),
    ],
)
def test_a_policy_that_was_changed_is_refused(change, sentence, folder) -> None:
    change(folder)
    with pytest.raises(UserError, match=f"{sentence}.*delete {folder} and run again"):
        policy.digest(folder)


def test_weights_that_are_not_finite_are_named(folder) -> None:
    policy.check_finite(folder)
    save_file({"weight": torch.tensor([1.0, torch.nan]).to(torch.bfloat16)}, folder / policy.WEIGHTS)
    with pytest.raises(UserError, match=r"model\.safetensors: weight has values that are not finite"):
        policy.check_finite(folder)


def test_the_vocabulary_is_that_of_the_configuration(folder) -> None:
    assert policy.vocabulary(folder) == 16
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 8}}))
    assert policy.vocabulary(folder) == 8
    for text in ("[]", "{}"):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match="has no vocab_size"):
            policy.vocabulary(folder)
