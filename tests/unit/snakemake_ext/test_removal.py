"""A folder that Snakemake removes is gone at once, even if some of its files cannot be removed."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
import snakemake.api  # noqa: F401 - before its modules
from snakemake import io

from rloo_pipeline.snakemake_ext import removal


class Output(str):
    """A file as Snakemake passes it."""

    __slots__ = ()
    is_storage = False


def remove(path: Path) -> None:
    asyncio.run(io.remove(Output(path), remove_non_empty_dir=True))


def test_a_folder_with_a_file_that_nfs_keeps_is_no_longer_under_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(io, "remove", io.remove)
    removal.rename_first(None)
    folder, rmdir = tmp_path / "00001", os.rmdir
    for name in ("00001", "00002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(os, "rmdir", refuse)
    remove(folder)
    assert not folder.exists()
    monkeypatch.setattr(os, "rmdir", rmdir)
    remove(tmp_path / "00002")
    assert list(tmp_path.iterdir()) == [], "what was left is removed later"


@pytest.mark.parametrize("kind", ["file", "link", "missing"])
def test_what_is_not_a_folder_is_removed_as_by_snakemake(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(io, "remove", io.remove)
    removal.rename_first(None)
    (tmp_path / "kept").mkdir()
    path = tmp_path / "output"
    if kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to("kept")
    remove(path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
