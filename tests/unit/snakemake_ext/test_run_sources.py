"""Local data is watched file by file, and a run is pinned if the Hub cannot change what it gets."""

import pytest
from helpers import mini

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
