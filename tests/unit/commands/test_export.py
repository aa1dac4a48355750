"""A policy of a run becomes a plain folder; an adapter is merged into its base."""

import json
import shutil
from pathlib import Path

import model_folders
import pytest
import torch
from helpers import mini, rloo
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_pipeline.artifacts.policy import Policy, seal
from rloo_pipeline.commands.export import export
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError, explain
from rloo_pipeline.runtime import guard
from rloo_pipeline.training import plain_model
from rloo_pipeline.transformers_internals.tokenizer_file import as_in_other_programs

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def adapted(tmp_path, tiny_model):
    """A run whose only policy is an adapter on all linear layers of a model."""
    folder = model_folders.adapter(tiny_model, tmp_path / "run" / "policies" / "00001", 1)
    seal(folder, "00001")
    return tmp_path / "run"


def test_a_merged_policy_gives_the_logits_of_base_and_adapter(tmp_path, tiny_model, adapted) -> None:
    config, output = Config(**mini()), tmp_path / "plain"
    with pytest.raises(UserError, match="add --merge"):
        export(config, adapted, output, merge=False)
    export(config, adapted, output, merge=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = logits(base)
    expected = logits(plain_model.load_adapter(base, Policy(adapted / "policies" / "00001")))
    actual = logits(AutoModelForCausalLM.from_pretrained(output))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert (actual - before).abs().max() > 0.1
    assert {"tokenizer.json", "chat_template.jinja"} & {file.name for file in output.iterdir()}
    with pytest.raises(UserError, match="exists"):
        export(config, adapted, output, merge=True)


def test_an_adapter_on_tied_weights_is_not_merged_and_an_absent_policy_is_told(tmp_path, tiny_model, adapted) -> None:
    config = Config(**mini())
    folder = model_folders.adapter(tiny_model, adapted / "policies" / "00002", 1, target_modules=["lm_head"])
    seal(folder, "00002")
    with pytest.raises(UserError, match="lm_head, which shares its weights"):
        export(config, adapted, tmp_path / "plain", merge=True)
    assert not (tmp_path / "plain").exists()
    with pytest.raises(UserError, match="00007: no such policy"):
        export(config, adapted, tmp_path / "plain", merge=True, number=7)


def test_a_folder_that_is_not_of_a_run_is_told(tmp_path, adapted) -> None:
    (tmp_path / "experiment.yaml").touch()
    policy, output = adapted / "policies" / "00001", tmp_path / "plain"
    assert f"{policy}: not the folder of a run" in rloo("export", policy, "--out", output).stderr
    assert f"{tmp_path}: the folder of an experiment" in rloo("export", tmp_path, "--out", output).stderr


def test_a_place_that_takes_no_folders_is_told_as_such(tmp_path, tiny_model) -> None:
    """/proc has no size, and so no space left."""
    folder = tmp_path / "run" / "policies" / "00001"
    shutil.copytree(tiny_model, folder)
    seal(folder, "00001")
    with pytest.raises(OSError, match="new folders") as refused:
        export(Config(**mini()), tmp_path / "run", Path("/proc/x"), merge=False)
    assert explain(refused.value) == (
        "/proc/x: its file system takes no new folders; run again once it can be written, or use another folder"
    )


def test_a_policy_of_a_run_that_is_write_protected_is_exported_into_a_folder_that_is_not(tmp_path, tiny_model) -> None:
    folder = tmp_path / "run" / "policies" / "00001"
    shutil.copytree(tiny_model, folder)
    seal(folder, "00001")
    (folder / ".snakemake_timestamp").touch()
    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    export(Config(**mini()), tmp_path / "run", tmp_path / "plain", merge=False)
    written = list((tmp_path / "plain").iterdir())
    assert all(path.stat().st_mode & 0o200 for path in (*written, tmp_path / "plain"))
    assert {path.name for path in written} == {path.name for path in tiny_model.iterdir()}


def test_a_light_controller_exports_a_policy_without_loading_its_tokenizer(
    tmp_path, tiny_model, caplog, monkeypatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "run" / "policies" / "00001")
    seal(tmp_path / "run" / "policies" / "00001", "00001")
    monkeypatch.setattr(guard, "is_installed", lambda name: name != "transformers")
    monkeypatch.delattr(Policy, "tokenizer")
    with caplog.at_level("INFO"):
        export(Config(**mini()), tmp_path / "run", tmp_path / "plain", merge=False)
    assert "transformers is missing" in caplog.text


@pytest.mark.parametrize(("model_type", "is_mended"), [("llama", True), ("qwen2", False)])
def test_an_exported_tokenizer_has_the_ids_of_training_in_other_programs(
    tmp_path, tiny_model, caplog, model_type, is_mended
) -> None:
    """As DeepSeek-R1-Distill-Llama. Of some types transformers ignores the class that the folder names."""
    folder = tmp_path / "run" / "policies" / "00001"
    shutil.copytree(tiny_model, folder)
    for name, change in (("config", {"model_type": model_type}), ("tokenizer_config", {"tokenizer_class": "Llama"})):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change).replace('"Llama"', '"LlamaTokenizerFast"'))
    seal(folder, "00001")
    with caplog.at_level("INFO"):
        export(Config(**mini()), tmp_path / "run", tmp_path / "plain", merge=False)
    text = " A  word, 123 caf\u00e9s\n"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    with as_in_other_programs():
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != ids
        assert (AutoTokenizer.from_pretrained(tmp_path / "plain")(text)["input_ids"] == ids) is is_mended
    assert Policy(tmp_path / "plain").tokenizer(text)["input_ids"] == ids
    assert ("warn: AutoTokenizer" in caplog.text) is not is_mended
