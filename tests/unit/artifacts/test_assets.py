"""A model or a data set of the user that was changed after it was staged is refused by the stage that reads it."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from rloo_pipeline.artifacts import assets
from rloo_pipeline.errors import UserError

FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def staged(tmp_path):
    """Assets that name a model and a data set elsewhere."""
    model = tmp_path / "model"
    (model / ".cache").mkdir(parents=True)
    for name in (*FILES, "pytorch_model.bin", ".cache/file", "README.md"):
        (model / name).write_text(f"of {name}")
    (tmp_path / "rows.jsonl").write_text('{"question": 1}\n')
    folder = tmp_path / "assets"
    folder.mkdir()
    places = {"model": model, "train": tmp_path / "rows.jsonl", "eval": "my_data.py:rows"}
    assets.write(folder, {key: {"path": str(path), "revision": None} for key, path in places.items()})
    return folder


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/tokenizer.json", "rows.jsonl"])
@pytest.mark.parametrize("change", ["a bit", "cut", "gone"])
def test_a_damaged_file_gives_a_one_line_error_that_names_it(staged, name, change) -> None:
    file = staged.parent / name
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1, *content[1:]]) if change == "a bit" else content[:-1])
    if change == "gone":
        file.unlink()
    with pytest.raises(UserError, match=rf"{name} .*; put it back as it was, or delete \S+/assets and run again"):
        assets.read(staged, "model", "train", "eval")


def test_a_file_that_was_added_later_is_refused(staged) -> None:
    (staged.parent / "model" / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"generation_config.json is new since the run began; "):
        assets.model_of(staged)


def test_files_that_no_stage_reads_may_change(staged) -> None:
    model = staged.parent / "model"
    for name in ("pytorch_model.bin", ".cache/file", "README.md", "notes.md"):
        (model / name).write_text("changed")
    assets.model_of(staged)
    (model / "model.safetensors").write_text("changed")
    assets.read(staged, "model", weights=False)
    assets.read(staged, "train", "eval")


def test_a_model_that_was_built_is_in_the_manifest(tmp_path) -> None:
    """Also where an older one is in its place when the stage runs."""
    output = tmp_path / "assets"
    (output / "model").mkdir(parents=True)
    (output / "model" / "config.json").write_text("old")
    assets.write(output, {"model": {"path": str(output / "model"), "revision": None}}, output)
    assert json.loads((output / assets.ASSETS).read_text())["model"]["files"] == {}
    assert assets.model_of(output) == output / "model"
    (output / "model" / "config.json").write_text("new")
    with pytest.raises(UserError, match=r"config.json .*; delete \S+/assets and run again"):
        assets.model_of(output)


def test_the_identity_of_a_model_follows_its_content_and_neither_its_place_nor_its_notes(tmp_path) -> None:
    folder, copy = tmp_path / "model", tmp_path / "copy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = {"body": np.ones((512, 512)), "head": np.ones((2, 512)), "bias": np.ones(1)}
    save_file(weights, folder / "model.safetensors")
    shutil.copytree(folder, copy)
    before = assets.identity(folder)
    for name in ("README.md", "LICENSE", "training_args.bin"):
        (copy / name).write_text("notes")
    assert assets.identity(copy) == before
    for name in weights:
        save_file(weights | {name: weights[name] + 1}, copy / "model.safetensors")
        assert assets.identity(copy) != before
    save_file(weights, copy / "model.safetensors")
    assert assets.identity(copy) == before
    (copy / "chat_template.jinja").write_text("")
    assert assets.identity(copy) != before
