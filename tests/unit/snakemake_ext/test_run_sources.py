"""Local data is watched file by file, a local model by its times, and a run is pinned if the Hub cannot change it."""

import os
import shutil
from pathlib import Path

import pytest
from helpers import mini, wait_until

from rloo_pipeline.artifacts import assets
from rloo_pipeline.config import Config
from rloo_pipeline.snakemake_ext import adoption, run_sources

READ = [
    *("chat_template.jinja", "tokenizer_config.json", "modeling_mine.py", "tokenizer.model", "mine.tiktoken"),
    *("vocab.txt", "merges.txt", "additional_chat_templates/tools.jinja"),
]
UNREAD = [
    *(
        "model.safetensors",
        ".x",
        "LICENSE",
        "README.txt",
        "model.q4.gguf",
        "config.json.lock",
        "config.json~",
        "core.77",
    ),
    *("runs/events.json", "checkpoint-5/config.json", "__pycache__/m.py", "trainer_state.json", "eval_results.json"),
]
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
    assert sorted(str(file.absolute().relative_to(below)) for file in files) == [
        "mine/README.md",
        "mine/train/0.jsonl",
        "test.jsonl",
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "README.md"])
@pytest.mark.parametrize(
    ("content", "minutes", "said"), [(b"new", 1, True), (b"more", -1, True), (b"new", -1, True), (b"old", -1, False)]
)
def test_a_file_of_a_local_model_that_is_newer_or_another_than_when_the_run_began_was_replaced(
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


@pytest.mark.parametrize(("content", "minutes", "said"), [(b"new", 1, False), (b"more", -1, True), (b"new", -1, True)])
def test_a_data_file_that_was_replaced_by_another_with_an_older_time_is_noticed(
    tmp_path, content, minutes, said
) -> None:
    """Snakemake makes everything again for a newer one."""
    file, folder = tmp_path / "train.jsonl", tmp_path / "assets"
    folder.mkdir()
    file.write_bytes(b"old")
    assets.write(folder, {"train": {"path": str(file), "revision": None}})
    time = (folder / assets.ASSETS).stat().st_mtime + 60 * minutes
    os.utime(file, (time, time))
    assert run_sources.replaced(folder) is None
    assert run_sources.unchanged(folder) == ({file} if minutes > 0 else set())
    other = tmp_path / "other.jsonl"
    other.write_bytes(content)
    os.utime(other, (time, time))
    other.rename(file)
    assert run_sources.unchanged(folder) == set()
    assert (f"{file} was replaced after the run began" in (run_sources.replaced(folder) or "")) == said


@pytest.mark.parametrize(("name", "said"), [*((name, True) for name in READ), *((name, False) for name in UNREAD)])
def test_a_file_that_was_added_to_a_local_model_or_removed_from_it_is_noticed(tmp_path, name, said) -> None:
    """Snakemake watches config.json alone, and a run that has its policy 0 no longer reads the model."""
    model, folder = tmp_path / "model", tmp_path / "assets"
    for one in (model, folder):
        one.mkdir()
    (model / "config.json").touch()
    assets.write(folder, {"model": {"path": str(model), "revision": None}})
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).touch()
    assert (f"{name} was added to {model} after the run began" in (run_sources.replaced(folder) or "")) == said
    assets.write(folder, {"model": {"path": str(model), "revision": None}})
    (model / name).unlink()
    assert (f"{name} was removed from {model} after the run began" in (run_sources.replaced(folder) or "")) == said
    shutil.rmtree(model)
    assert run_sources.replaced(folder) is None, "a whole model that is gone is another matter"


def let_time_pass(file: Path) -> None:
    """Waits until a file that is written now is later than `file` by more than a tick of the kernel's clock."""
    probe = file.parent.with_name("probe")

    def is_later() -> bool:
        probe.touch()
        return probe.stat().st_ctime > file.stat().st_ctime + 0.02

    wait_until(is_later)


@pytest.mark.parametrize("by", ["link", "rename"])
@pytest.mark.parametrize(("name", "key"), [("model.safetensors", "model"), ("rows.jsonl", "train")])
def test_another_folder_of_the_same_sizes_and_older_times_is_noticed(tmp_path, by, name, key) -> None:
    named, folder = tmp_path / "named", tmp_path / "assets"
    for one in ("old", "new"):
        (tmp_path / one).mkdir()
        (tmp_path / one / name).write_text(one)
    named.symlink_to("old") if by == "link" else (tmp_path / "old").rename(named)
    folder.mkdir()
    assets.write(folder, {key: {"path": str(named), "revision": None}})
    assert run_sources.replaced(folder) is None
    let_time_pass(folder / assets.ASSETS)
    if by == "link":
        named.unlink()
        named.symlink_to("new")
    else:
        named.rename(tmp_path / "aside")
        (tmp_path / "new").rename(named)
    assert f"{named / name} was replaced after the run began" in (run_sources.replaced(folder) or "")


def test_a_new_file_beside_others_or_other_rights_have_none_of_them_read(tmp_path, monkeypatch) -> None:
    """Up to a GiB would be read at each later start."""
    model, folder = tmp_path / "models" / "mine", tmp_path / "assets"
    model.mkdir(parents=True)
    folder.mkdir()
    (model / "model.safetensors").touch()
    assets.write(folder, {"model": {"path": str(model), "revision": None}})
    let_time_pass(folder / assets.ASSETS)
    (model / "README.md").touch()
    model.chmod(0o700)
    monkeypatch.setattr(run_sources.manifest, "digest", lambda file: pytest.fail(f"{file} was read"))
    assert run_sources.replaced(folder) is None


def test_a_model_that_is_gone_hides_no_data_that_is_replaced(tmp_path) -> None:
    model, data, folder = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "assets"
    for one in (model, folder):
        one.mkdir()
    for file in (model / "config.json", data):
        file.write_text("old")
    places = {name: {"path": str(path), "revision": None} for name, path in (("model", model), ("train", data))}
    assets.write(folder, places)
    shutil.rmtree(model)
    data.write_text("other")
    os.utime(data, (1e9, 1e9))
    assert f"{data} was replaced after the run began" in (run_sources.replaced(folder) or "")


def test_weights_on_a_server_whose_clock_is_ahead_were_not_replaced(tmp_path) -> None:
    weights, folder = tmp_path / "model" / "model.safetensors", tmp_path / "assets"
    weights.parent.mkdir()
    folder.mkdir()
    weights.touch()
    ahead = weights.stat().st_mtime + 300
    os.utime(weights, (ahead, ahead))
    assets.write(folder, {"model": {"path": str(weights.parent), "revision": None}})
    assert run_sources.replaced(folder) is None
    adoption.accept_sources(folder)
    assert run_sources.replaced(folder) is None
    os.utime(weights, (ahead + 1, ahead + 1))
    assert f"{weights} was replaced after the run began" in (run_sources.replaced(folder) or "")


def test_a_source_from_the_future_hides_no_other_that_is_replaced(tmp_path) -> None:
    ahead, data, folder = tmp_path / "ahead.jsonl", tmp_path / "data.jsonl", tmp_path / "assets"
    folder.mkdir()
    for file in (ahead, data):
        file.write_bytes(b"old")
    os.utime(ahead, (2e9, 2e9))
    places = {name: {"path": str(file), "revision": None} for name, file in (("eval", ahead), ("train", data))}
    assets.write(folder, places)
    assert run_sources.replaced(folder) is None
    other = tmp_path / "other"
    other.write_bytes(b"new")
    os.utime(other, (1e9, 1e9))
    let_time_pass(folder / assets.ASSETS)
    other.rename(data)
    assert f"{data} was replaced after the run began" in (run_sources.replaced(folder) or "")


def test_the_files_of_a_source_are_listed_once(tmp_path, monkeypatch) -> None:
    """A list of thousands of files takes long on a shared file system."""
    data, folder = tmp_path / "data", tmp_path / "assets"
    for one in (data, folder):
        one.mkdir()
    for number in range(20):
        (data / f"{number}.jsonl").touch()
    listed = list[Path]()
    monkeypatch.setattr(
        assets, "file_names", lambda path: listed.append(path) or [file.name for file in path.iterdir()]
    )
    assets.write(folder, {"train": {"path": str(data), "revision": None}})
    assert listed == [data]


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_folder_that_the_run_began_with_is_not_looked_for_on_the_hub_while_it_is_missing(
    tmp_path, monkeypatch, name
) -> None:
    monkeypatch.chdir(tmp_path)
    config, other = (
        Config(
            **mini(
                model={"build": None, "build_options": {}, "name_or_path": model},
                dataset={"train": {"generator": None, "options": {}, "name": data}},
            )
        )
        for model, data in (("model", "data"), ("org/model", "org/data"))
    )
    folder = tmp_path / "assets"
    for source in ("model", "data", "assets"):
        (tmp_path / source).mkdir()
        (tmp_path / source / "file.json").touch()
    places = {"model": {"path": "model", "revision": None}, "train": {"path": "data", "revision": None}}
    assets.write(folder, places)
    assert run_sources.lost(config, folder) is None
    (tmp_path / name).rename(tmp_path / "elsewhere")
    assert f"{name} is missing" in (run_sources.lost(config, folder) or "")
    assert run_sources.lost(other, folder) is None


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
