"""Of two processes that run the same stage, the later one's result stands, in whatever order they write."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from rloo_pipeline.artifacts import fence, files
from rloo_pipeline.errors import UserError, explain


@pytest.fixture
def turns(tmp_path, monkeypatch):
    """Makes this process one of two: `older`, which has started already, or `later`, which starts when it is named."""
    monkeypatch.setenv(fence.VARIABLE, "")  # so that it goes when the test ends
    tokens = {}

    def turn(name: str) -> None:
        monkeypatch.delenv(fence.VARIABLE, raising=False)
        if name not in tokens:
            fence.acquire(tmp_path, tmp_path / "policies" / "00001")
            tokens[name] = os.environ[fence.VARIABLE]
        os.environ[fence.VARIABLE] = tokens[name]

    turn("older")
    return turn


def fill(folder: Path, name: str) -> None:
    (folder / "weights").write_text(name)


def test_what_an_older_process_writes_is_refused(tmp_path, turns) -> None:
    turns("later")
    files.write_json(tmp_path / "metrics.json", {"is": "later"})
    for end in ("at work", "done"):
        if end == "done":
            fence.release(done=True)
        turns("older")
        with pytest.raises(UserError, match="policies/00001: the same stage was started again"):
            files.write_json(tmp_path / "metrics.json", {"is": "older"})
        turns("later")
    assert files.read_json(tmp_path / "metrics.json") == {"is": "later"}


def test_on_nfs_a_file_that_a_later_process_has_removed_is_not_a_failed_file_system(tmp_path, turns) -> None:
    def lose_file() -> None:
        with files.atomic_write(tmp_path / "metrics.json"):
            turns("later")
            turns("older")
            raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(UserError, match="started again"):
        lose_file()


def test_a_token_that_cannot_be_read_is_named(turns, monkeypatch) -> None:
    turns("older")
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=failure))
    with pytest.raises(OSError, match="Input/output error") as raised:
        fence.check()
    assert explain(raised.value).partition(":")[0].endswith("/.fence/policies__00001")


@pytest.mark.parametrize("method", ["read_text", "unlink"])
def test_a_stage_that_has_written_its_result_does_not_fail_because_of_its_token(tmp_path, turns, monkeypatch, method):
    with monkeypatch.context() as broken:
        broken.setattr(Path, method, mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        fence.release(done=True)
    assert fence.VARIABLE not in os.environ
    turns("later")
    files.write_json(tmp_path / "metrics.json", {"is": "later"})


@pytest.mark.parametrize("first", ["older", "later"])
def test_the_later_of_two_concurrent_writers_leaves_a_complete_folder(tmp_path, turns, first) -> None:
    path = tmp_path / "policies" / "00001"

    def interleave_writers() -> None:
        """One process begins, the other writes everything, then the first one ends."""
        turns(first)
        with files.atomic_folder(path) as temporary:
            fill(temporary, first)
            second = "later" if first == "older" else "older"
            turns(second)
            with files.atomic_folder(path) as other:
                fill(other, second)
            turns(first)

    with pytest.raises(UserError, match="started again"):
        interleave_writers()
    turns("later")
    if first == "later":
        with files.atomic_folder(path) as temporary:
            fill(temporary, "later")
    assert (path / "weights").read_text() == "later"
    assert [file.name for file in path.parent.iterdir()] == ["00001"]


def test_a_process_with_several_stages_takes_a_token_for_each(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(fence.VARIABLE, raising=False)
    for done in (False, True):
        fence.acquire(tmp_path, tmp_path / "a")
        fence.release(done)
        assert fence.VARIABLE not in os.environ
        assert (tmp_path / ".fence" / "a").exists() != done


def test_what_a_process_left_that_was_killed_before_its_rename_goes_with_the_next_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(fence.VARIABLE, "")
    monkeypatch.delenv(fence.VARIABLE)
    (tmp_path / ".fence").mkdir()
    left, other = (tmp_path / ".fence" / f"{name}.{'0f' * 16}" for name in ("a", "a.json"))
    left.write_text("0f" * 16)
    other.write_text("0f" * 16)
    fence.acquire(tmp_path, tmp_path / "a")
    fence.release(done=True)
    assert list((tmp_path / ".fence").iterdir()) == [other]


def test_a_process_whose_temporary_file_another_one_removed_takes_the_token_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(fence.VARIABLE, "")
    monkeypatch.delenv(fence.VARIABLE)
    replace, removed = os.replace, []

    def replace_too_late(source: Path, target: Path) -> None:
        if not removed:
            removed.append(source)
            source.unlink()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_too_late)
    fence.acquire(tmp_path, tmp_path / "a")
    fence.check()
    assert removed
    assert [file.name for file in (tmp_path / ".fence").iterdir()] == ["a"]
    fence.release(done=True)
