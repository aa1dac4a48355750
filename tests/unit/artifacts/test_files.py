"""Files are written completely or not at all, and a manifest detects every change."""

import errno
import io
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from rloo_pipeline.artifacts import files, manifest, tables
from rloo_pipeline.errors import UserError, explain


def test_a_file_appears_only_when_it_is_complete(tmp_path) -> None:
    path = tmp_path / "sub" / "value.json"

    def fail_half_way() -> None:
        with files.atomic_write(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert list(path.parent.iterdir()) == []
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1}


def test_a_folder_replaces_the_old_one_in_one_step(tmp_path) -> None:
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with files.atomic_folder(path) as temporary:
            (temporary / content).write_text(content)
    assert [file.name for file in path.iterdir()] == ["new"]
    with pytest.raises(RuntimeError), files.atomic_folder(path) as temporary:
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_older_folders_are_removed_once_a_newer_one_is_there(tmp_path) -> None:
    for name in ("00001", "00002", "00004"):
        (tmp_path / name).mkdir()
    files.remove_older(tmp_path / "00003")
    files.remove_older(tmp_path / "00002")
    assert {folder.name for folder in tmp_path.iterdir()} == {"00002", "00004"}


def test_the_old_folder_stays_if_the_new_one_cannot_replace_it(tmp_path, monkeypatch) -> None:
    path = tmp_path / "folder"
    with files.atomic_folder(path) as temporary:
        (temporary / "old").touch()
    replace, calls = os.replace, iter(range(3))

    def fail_second(source: Path, target: Path) -> None:
        if next(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_second)
    with pytest.raises(UserError, match="the file system failed"), files.atomic_folder(path) as temporary:
        (temporary / "new").touch()
    assert [file.name for file in path.iterdir()] == ["old"]


def test_a_request_that_nfs_repeats_after_it_succeeded_is_no_error(tmp_path, monkeypatch) -> None:
    replace, mkdir = os.replace, Path.mkdir

    def replace_twice(source: Path, target: Path) -> None:
        replace(source, target)
        replace(source, target)

    def mkdir_twice(path: Path, *arguments: int, exist_ok: bool = False, **options: bool) -> None:
        mkdir(path, *arguments, exist_ok=exist_ok, **options)
        mkdir(path, *arguments, exist_ok=exist_ok, **options)

    monkeypatch.setattr(os, "replace", replace_twice)
    monkeypatch.setattr(Path, "mkdir", mkdir_twice)
    for content in ("old", "new"):
        files.write_text(tmp_path / "file", content)
        with files.atomic_folder(tmp_path / "folder") as temporary:
            (temporary / content).touch()
    assert (tmp_path / "file").read_text() == "new"
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")) == ["file", "folder", "folder/new"]
    monkeypatch.setattr(os, "replace", lambda source, target: replace(tmp_path / "lost", target))
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "file", "newer")


def test_a_folder_is_written_where_permissions_cannot_be_changed_and_folders_not_flushed(tmp_path, monkeypatch) -> None:
    def refuse(number: int) -> mock.Mock:
        return mock.Mock(side_effect=OSError(number, os.strerror(number)))

    monkeypatch.setattr(Path, "chmod", refuse(errno.EPERM))
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    with files.atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "file").touch()
    assert (tmp_path / "folder" / "file").exists()


def test_the_later_of_two_writers_wins(tmp_path) -> None:
    path = tmp_path / "table"

    def overtaken() -> None:
        with files.atomic_write(path) as first:
            first.write_text("first")
            files.write_json(path, {"is": "second"})

    with pytest.raises(FileNotFoundError):
        overtaken()
    assert files.read_artifact(path) == {"is": "second"}
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


def test_a_link_that_a_killed_writer_left_is_removed_and_what_it_leads_to_is_not(tmp_path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / ".own.0.tmp").symlink_to("shared")
    files.write_text(tmp_path / "own", "text")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["own", "shared"]


@pytest.mark.parametrize("cache", [True, False])
def test_what_snakemake_may_put_into_its_cache_is_not_a_link_to_a_file_of_the_user(
    tmp_path, monkeypatch, cache
) -> None:
    """It makes the files in there writable for everyone."""
    monkeypatch.delenv(files.OUTPUT_CACHE, raising=False)
    if cache:
        monkeypatch.setenv(files.OUTPUT_CACHE, "/cache")
    source, target = tmp_path / "model.safetensors", tmp_path / "policy" / "model.safetensors"
    source.write_text("weights")
    files.link_or_copy(source, target)
    assert target.read_text() == "weights"
    assert target.samefile(source) != cache


def test_a_manifest_detects_every_change(tmp_path) -> None:
    (tmp_path / "a").write_text("content")
    manifest.write_manifest(tmp_path, round=3)
    assert manifest.verify_manifest(tmp_path).about == {"round": 3}
    for name, text, word in (
        ("a", "conten", "truncated"),
        ("a", "CONTENT", "blake3"),
        ("b", "", "not written by this run"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=word):
            manifest.verify_manifest(tmp_path)
        (tmp_path / "a").write_text("content")
    (tmp_path / "b").unlink()
    (tmp_path / "a").unlink()
    with pytest.raises(UserError, match="is missing"):
        manifest.verify_manifest(tmp_path)


def test_without_disk_space_the_error_names_the_folder_and_no_file_is_left(tmp_path) -> None:
    def write() -> None:
        with files.atomic_write(tmp_path / "table") as temporary:
            temporary.write_text("a half")
            Path("/dev/full").write_text("the other half")

    with pytest.raises(UserError, match=f"no space left in {tmp_path}: free some"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_file_system_names_the_folder_and_leaves_no_file(tmp_path) -> None:
    """Python's errors after `open` have no file name; safetensors and torch raise their own."""
    stale, read_only = (os.strerror(code) for code in (errno.ESTALE, errno.EROFS))
    for failure, why in (
        (OSError(errno.ESTALE, stale), stale),
        (RuntimeError(f"I/O error: {stale} (os error {errno.ESTALE})"), stale),
        (RuntimeError(f"unable to open file <x> in read-only mode: {stale} ({errno.ESTALE})"), stale),
        (RuntimeError(f"I/O error: {read_only} (os error {errno.EROFS})"), read_only),
    ):

        def write(failure: Exception = failure) -> None:
            with files.atomic_write(tmp_path / "table") as temporary:
                temporary.write_text("a half")
                raise failure

        with pytest.raises(UserError, match=rf"^{tmp_path}: the file system failed \({why}\); run again"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_file_that_cannot_be_removed_fails_no_writer_and_hides_no_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    files.write_json(tmp_path / "value.json", {"a": 1})
    assert files.read_json(tmp_path / "value.json") == {"a": 1}
    with pytest.raises(RuntimeError), files.atomic_write(tmp_path / "other"):
        raise RuntimeError


@pytest.mark.parametrize(
    ("place", "named"), [("", "Is a directory"), ("file/x", "File exists"), ("file/x/y", "Not a directory")]
)
def test_an_output_where_no_file_can_be_is_named(tmp_path, place, named) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((IsADirectoryError, NotADirectoryError, FileExistsError)) as error:
        files.write_json(tmp_path / place, {})
    assert re.fullmatch(rf"{tmp_path}.*: {named}; name a different path", explain(error.value))


def test_a_file_over_the_limit_on_file_sizes_is_named(tmp_path) -> None:
    with pytest.raises(OSError, match="File too large") as raised, files.atomic_write(tmp_path / "table"):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert explain(raised.value).startswith(f"{tmp_path / 'table'}: over the limit on file sizes")


@pytest.mark.parametrize("read", [files.read_json, manifest.digest, lambda path: tables.read(path, "scores")])
def test_an_error_in_reading_names_the_file(tmp_path, read) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    with mock.patch.object(io, "open", return_value=FailsToRead()), pytest.raises(OSError, match="file") as error:
        read(path)
    assert explain(error.value).startswith(f"{path}: the file system failed (Input/output error); run again")


def test_an_error_that_is_not_about_a_file_keeps_its_text(tmp_path) -> None:
    for error in (OSError("no tokenizer can be loaded"), ConnectionRefusedError(errno.ECONNREFUSED, "refused")):
        text = str(error)
        with pytest.raises(OSError, match=re.escape(text)), files.atomic_folder(tmp_path / "model"):
            raise error
        assert explain(error).endswith(text)


class FailsToRead(io.RawIOBase):
    """A file whose server fails."""

    def readinto(self, *_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    read = readall = readinto


def test_one_rank_reports_a_change_and_each_reads_its_part(tmp_path, monkeypatch) -> None:
    names = [f"{number}.safetensors" for number in range(7)]
    for name in names:
        (tmp_path / name).write_text(name)
    manifest.write_manifest(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")

    def fails(rank: int) -> bool:
        monkeypatch.setenv("RANK", str(rank))
        try:
            manifest.verify_manifest(tmp_path)
        except UserError as error:
            return "was changed" in str(error)
        return False

    assert not any(fails(rank) for rank in range(3))
    for name in names:
        (tmp_path / name).write_text(name.upper())
        assert sum(fails(rank) for rank in range(3)) == 1, name
        (tmp_path / name).write_text(name)


def test_a_manifest_names_files_of_other_nodes_that_a_folder_does_not_list_yet(tmp_path, monkeypatch) -> None:
    (tmp_path / "written").write_text("elsewhere")
    monkeypatch.setattr(manifest, "folder_files", lambda _: [])
    assert manifest.write_manifest(tmp_path, {"written": "its digest"}).digests == {"written": "its digest"}
    with pytest.raises(FileNotFoundError):
        manifest.write_manifest(tmp_path, {"lost": "its digest"})
