"""Snakemake's cache between workflows, as several runs use it."""

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import snakemake.api  # noqa: F401 - before its modules
from helpers import write_prompts
from snakemake.caching.local import OutputFileCache
from snakemake.exceptions import CacheMissException

from rloo_pipeline.artifacts import manifest, tables
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import shared_cache

RUNS = 3


@pytest.fixture
def cache(tmp_path, monkeypatch) -> OutputFileCache:
    for name in ("store", "fetch"):
        monkeypatch.setattr(OutputFileCache, name, getattr(OutputFileCache, name))
    shared_cache.make_safe(SimpleNamespace(workflow=SimpleNamespace(workflow_settings=SimpleNamespace(cache=[]))))
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("SNAKEMAKE_OUTPUT_CACHE", str(tmp_path / "cache"))
    cache = OutputFileCache()

    async def entry_of(_job: object) -> str:
        return "key"

    monkeypatch.setattr(cache, "provenance_hash_map", SimpleNamespace(get_provenance_hash=entry_of))
    return cache


def job(output: Path) -> SimpleNamespace:
    rule = SimpleNamespace(output=[SimpleNamespace(is_multiext=False)])
    return SimpleNamespace(rule=rule, output=[str(output)])


def write_folder(output: Path) -> None:
    write_prompts(output, [{"prompt_id": "p", "prompt": "1 + 1"}])


def write_table(output: Path) -> None:
    output.parent.mkdir()
    tables.write(output.with_suffix(".parquet"), [], tables.TRAIN, "train")


@pytest.mark.parametrize("write", [write_folder, write_table])
def test_runs_that_store_the_same_entry_at_once_all_have_it_whole(cache, tmp_path, write) -> None:
    suffix = "" if write is write_folder else ".parquet"
    outputs = [tmp_path / str(run) / f"made{suffix}" for run in range(RUNS)]
    for output in outputs:
        write(output)
    together = threading.Barrier(RUNS)

    def store(output: Path) -> None:
        together.wait()
        asyncio.run(cache.store(job(output)))

    threads = [threading.Thread(target=store, args=(output,)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(map(shared_cache.is_damaged, outputs))
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [f"key{suffix}"]


def test_a_damaged_entry_is_made_again(cache, tmp_path) -> None:
    first, second = tmp_path / "first" / "made", tmp_path / "second" / "made"
    write_folder(first)
    asyncio.run(cache.store(job(first)))
    asyncio.run(cache.fetch(job(second)))
    manifest.verify_manifest(second)
    entry = tmp_path / "cache" / "key"
    for damage in (
        lambda: (entry / "key").mkdir() or (entry / "key" / "inside").write_text("of another run"),
        lambda: next((entry / "train").glob("*.arrow")).write_bytes(b"short"),
        lambda: (entry / manifest.MANIFEST).unlink(),
    ):
        damage()
        with pytest.raises(CacheMissException):
            asyncio.run(cache.fetch(job(tmp_path / "third" / "made")))
        again = tmp_path / "again" / "made"
        shutil.rmtree(again, ignore_errors=True)
        write_folder(again)
        asyncio.run(cache.store(job(again)))
        for output in (first, second, again):
            manifest.verify_manifest(output)


def test_an_entry_stays_when_the_file_system_fails(cache, tmp_path, monkeypatch) -> None:
    first = tmp_path / "first" / "made"
    write_folder(first)
    asyncio.run(cache.store(job(first)))
    monkeypatch.setattr(manifest, "digest", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(UserError, match="cache/key: the file system failed"):
        asyncio.run(cache.fetch(job(tmp_path / "second" / "made")))
    monkeypatch.undo()
    manifest.verify_manifest(first)


def test_an_entry_that_is_damaged_when_another_is_stored_is_replaced(cache, tmp_path) -> None:
    (tmp_path / "cache" / "key").mkdir()
    (tmp_path / "cache" / "key" / "half").write_text("")
    write_folder(tmp_path / "run" / "made")
    asyncio.run(cache.store(job(tmp_path / "run" / "made")))
    manifest.verify_manifest(tmp_path / "run" / "made")
