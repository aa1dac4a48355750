"""A sampler takes a policy before a stage asks for it, while the folder is still on its way to its place."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rloo_pipeline import kept
from rloo_pipeline.generation import groups
from rloo_pipeline.workers import server


@pytest.fixture
def beside(tmp_path) -> Path:
    folder = tmp_path / ".00001.tmp"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def taken(beside, monkeypatch) -> list[str]:
    """What a kept sampler for policies of this kind takes; each is renamed as soon as it begins to."""
    found: list[str] = []

    def swap(folder: Path, longest: int) -> None:
        assert longest == 0, "a policy to come asks for no context"
        beside.rename(beside.with_name("00001"))
        found.append((folder / "config.json").read_text())

    monkeypatch.setattr(kept, "_on", True)
    kept.keep("sampler", ("engine", 0, "{}"), SimpleNamespace(swap=swap))
    yield found
    kept.take("sampler", ("engine", 0, "{}"))


def test_it_is_read_under_whatever_name(beside, taken) -> None:
    assert groups.take_ahead(beside)
    assert taken == ["{}"]
    assert kept.look("sampler"), "and the sampler is still there for its stage"


def test_one_that_is_gone_of_another_kind_or_an_adapter_is_left(beside, taken) -> None:
    assert not groups.take_ahead(beside / "gone")
    (beside / "config.json").write_text("{ }")
    assert not groups.take_ahead(beside)
    (beside / "config.json").write_text("{}")
    (beside / "adapter_config.json").write_text("{}")
    assert not groups.take_ahead(beside)
    assert taken == []


@pytest.mark.parametrize("error", [OSError("half of it"), kept.Unfit("a cache in use")])
def test_an_engine_that_failed_at_it_is_not_used_again(beside, monkeypatch, error) -> None:
    def fail(*_) -> None:
        raise error

    monkeypatch.setattr(groups, "take_ahead", fail)
    assert not server._take_ahead(beside)


def test_without_a_sampler_nothing_is_taken(beside) -> None:
    assert not groups.take_ahead(beside)
