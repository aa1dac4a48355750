"""A policy is unchanged since a stage wrote it, and of the round in its name; a model has finite weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rloo_pipeline.artifacts import model_files, policy
from rloo_pipeline.artifacts.model_files import WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError


@pytest.fixture
def folder(tmp_path) -> Path:
    """Policy 3 of a run."""
    folder = tmp_path / "policies" / "00003"
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(4, 4)}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16}))
    (folder / "tokenizer.json").write_text("{}")
    policy.seal(folder, "00003")
    return folder


def test_the_digest_of_a_policy_is_that_of_its_files_wherever_they_are(folder, tmp_path) -> None:
    (folder / "part").mkdir()
    (folder / "part" / "config.json").write_text("{}")  # of a part, which no engine reads
    renamed = folder.rename(tmp_path / "model")
    assert Policy(renamed).digest == policy.seal(renamed, "00003")
    renamed_back = renamed.rename(folder)
    assert Policy(renamed_back).digest == policy.seal(renamed_back, "00003")
    (renamed_back / "tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer\.json was changed"):
        Policy(renamed_back).verify()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"text_config": "x"}, "text_config is 'x', not an object"),
        ({"text_config": {"rope_scaling": 3}}, "rope_scaling is 3, not an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": [1]}}}, r"rope_type is \[1\], not a string"),
        ({"rope_parameters": {"factor": "x"}}, "factor is 'x', not a number"),
        ({"quantization_config": True}, "quantization_config is True, not an object"),
        ({"architectures": 3}, "architectures is 3, not a list"),
        ({"model_type": [1]}, r"model_type is \[1\], not a string"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many', not a number"),
        ({"num_experts": [1]}, r"num_experts is \[1\], not a number"),
    ],
)
def test_a_key_of_a_wrong_type_is_named_with_its_file(tmp_path, change, sentence) -> None:
    (tmp_path / "config.json").write_text(json.dumps(change))
    with pytest.raises(UserError, match=rf"config\.json: {sentence}; fetch or write the model again"):
        Policy(tmp_path).config


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda folder: save_file({"weight": torch.zeros(4, 4)}, folder / WEIGHTS),
            "safetensors was changed",
        ),
        (lambda folder: (folder / WEIGHTS).unlink(), "safetensors is missing"),
        (lambda folder: (folder / "more.safetensors").touch(), "more.safetensors was not written by this run"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json: has no digest"),
        (lambda folder: (folder / "manifest.json").unlink(), "00003: has no manifest.json"),
        (lambda folder: policy.seal(folder, "00002"), "00003: its policy is 00002, but 00003 is expected here"),
    ],
)
def test_a_policy_that_was_changed_is_refused(change, sentence, folder) -> None:
    change(folder)
    with pytest.raises(UserError, match=f"{sentence}.*delete {folder} and run again"):
        Policy(folder).digest


def test_weights_that_are_not_finite_are_named(folder) -> None:
    model_files.check_finite(Policy(folder).weights)
    save_file({"weight": torch.tensor([1.0, torch.nan]).to(torch.bfloat16)}, folder / WEIGHTS)
    with pytest.raises(UserError, match=r"model\.safetensors: weight has values that are not finite"):
        model_files.check_finite(Policy(folder).weights)


def test_the_vocabulary_is_that_of_the_configuration(folder) -> None:
    assert Policy(folder).vocabulary == 16
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 8}}))
    assert Policy(folder).vocabulary == 8
    for text, sentence in (
        ("[]", "not an object with keys"),
        ("{}", "has no vocab_size"),
        ("{", f"config.json: not valid JSON.*delete {folder} and run again"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=sentence):
            Policy(folder).vocabulary
