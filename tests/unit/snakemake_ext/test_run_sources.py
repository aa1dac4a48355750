"""Local data is watched file by file, a local model by its times, and a run is pinned if the Hub cannot change it."""

import os

import pytest
from helpers import mini

from rloo_pipeline.artifacts import assets
from rloo_pipeline.config import Config
from rloo_pipeline.snakemake_ext import run_sources

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("data_dir", [None, "data"])
def test_the_files_of_a_data_folder_are_watched(tmp_path, monkeypatch, data_dir) -> None:
    monkeypatch.chdir(tmp_path)
    below = tmp_path / (data_dir or "")
    for name in ("mine/README.md", "mine/train/0.jsonl", "mine/.cache/x", "mine/.lock", "test.jsonl"):
        (below / name).parent.mkdir(parents=True, exist_ok=True)
        (below / name).touch()
    dataset = {"train": {"generator": None, "options": {}, "name": "mine"}}
    dataset["eval"] = {"generator": None, "options": {}, "path": "test.jsonl"}
    files = run_sources.local_files(Config(**mini(data_dir=data_dir, dataset=dataset)))
    assert [str(file.absolute().relative_to(below)) for file in files] == [
        "mine/README.md",
        "mine/train/0.jsonl",
        "test.jsonl",
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "README.md"])
@pytest.mark.parametrize(("content", "minutes", "said"), [(b"new", 1, True), (b"more", -1, True), (b"new", -1, False)])
def test_a_file_of_a_local_model_that_is_newer_or_longer_than_when_the_run_began_was_replaced(
    tmp_path, name, content, minutes, said
) -> None:
    file, folder = tmp_path / "model" / name, tmp_path / "assets"
    for revision, here in ((None, said and name != "README.md"), (SHA, False)):
        file.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        file.write_bytes(b"old")
        assert run_sources.replaced(folder) is None
        assets.write(folder, {"model": {"path": str(file.parent), "revision": revision}})
        assert run_sources.replaced(folder) is None
        file.write_bytes(content)
        time = (folder / assets.ASSETS).stat().st_mtime + 60 * minutes
        os.utime(file, (time, time))
        assert (f"{file} was replaced after the run began" in (run_sources.replaced(folder) or "")) == here
        (folder / assets.ASSETS).unlink()


@pytest.mark.parametrize(
    ("model", "train", "pinned"),
    [
        (SHA, SHA, True),
        (None, SHA, False),
        ("main", SHA, False),
        (SHA, None, False),
        (SHA, "v1.0", False),
    ],
)
def test_only_commits_pin_what_comes_from_the_hub(tmp_path, monkeypatch, model, train, pinned) -> None:
    changes = {
        "model": {"build": None, "build_options": {}, "name_or_path": "org/model", "revision": model},
        "dataset": {"train": {"generator": None, "options": {}, "name": "org/data", "revision": train}},
    }
    monkeypatch.chdir(tmp_path)
    assert run_sources.are_pinned(Config(**mini(**changes))) == pinned
    for local in ("org/model", "org/data"):
        (tmp_path / local).mkdir(parents=True)
    assert run_sources.are_pinned(Config(**mini(**changes)))
