"""Snakemake's cache between workflows, for runs that begin at the same time and for entries that were damaged.

Of two runs that store the same entry at once, Snakemake 9.27 moves the second one's folder into that of the first. Here
the first stays, and the second run uses it: what decides an entry is in its name. An entry is checked before a run
takes it; a damaged one is removed and made again. In a run, a folder of the cache is a folder of links to files: no run
changes the time of another's folder, and readers that do not follow links find the folders below it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard

TIMESTAMP = ".snakemake_timestamp"
"""Snakemake's file in a folder with the time of the job that made it."""


def make_safe() -> None:
    """Changes Snakemake's cache in this process.

    Raises:
        UserError: its methods take other parameters than those known here.
    """
    from snakemake.caching.local import OutputFileCache

    if OutputFileCache.store.__module__ == __name__:
        return
    for name in ("store", "fetch"):
        guard.require_callable(OutputFileCache, name, "(self, job)")
    fetch = OutputFileCache.fetch

    async def store(self: Any, job: Any) -> None:
        for output, entry in await self.get_outputfiles_and_cachefiles(job):
            self.check_writeable(entry)
            keep(output, entry, self.set_permissions)
            link(output, entry, self.symlink)

    async def fetch_whole(self: Any, job: Any) -> None:
        pairs = await self.get_outputfiles_and_cachefiles(job)
        for _, entry in pairs:
            if entry.exists() and is_damaged(entry):
                discard(entry)
        if not all(entry.is_dir() for _, entry in pairs):
            await fetch(self, job)  # files, or a miss
            return
        for output, entry in pairs:
            self.check_readable(entry)
            link(output, entry, self.symlink)

    OutputFileCache.store, OutputFileCache.fetch = store, fetch_whole


def keep(output: Path, entry: Path, set_permissions: Any) -> None:
    """Moves a job's output into the cache, unless another run has stored a whole one meanwhile.

    Args:
        output: file or folder.
        entry: its place in the cache.
        set_permissions: makes a file or folder readable for those who share the cache.
    """
    with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
        moved = Path(folder, entry.name)
        shutil.move(output, moved, copy_function=shutil.copy)  # the cache may be on another file system
        set_permissions(moved)
        while True:
            try:
                moved.rename(entry)  # never into a folder that is there
                return
            except OSError:  # of a folder whose place is taken; a file takes the place of an equal one
                if not entry.is_dir():
                    raise
                if not is_damaged(entry):
                    return
                discard(entry)


def link(output: Path, entry: Path, symlink: Any) -> None:
    """Makes an output of links to the files of an entry; its folders are the run's own, with their own times.

    Args:
        output: file or folder to make.
        entry: in the cache.
        symlink: makes a link that is new.
    """
    if not entry.is_dir():
        symlink(entry, output)
        return
    output.mkdir(parents=True, exist_ok=True)
    for inner in sorted(entry.iterdir()):
        if inner.name != TIMESTAMP:
            link(output / inner.name, inner, symlink)


def is_damaged(entry: Path) -> bool:
    """Whether an entry of the cache is not what a stage wrote; by sizes alone where there is no blake3."""
    try:
        if entry.is_dir():
            manifest.verify_manifest(entry)
        else:
            from rloo_pipeline.artifacts import tables

            tables.read(entry, tables.facts_in(entry)["kind"])
    except UserError:
        return True
    except ImportError:
        return _sizes_differ(entry)
    except (OSError, ValueError, KeyError):
        return True
    return False


def _sizes_differ(entry: Path) -> bool:
    if not entry.is_dir():
        return False
    files = read_artifact(entry / manifest.MANIFEST)["files"]
    return {name: about["bytes"] for name, about in files.items()} != {
        str(file.relative_to(entry)): file.stat().st_size for file in manifest.folder_files(entry)
    }


def discard(entry: Path) -> None:
    """Removes an entry at once for all who look for it."""
    with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
        try:
            entry.rename(Path(folder, entry.name))
        except FileNotFoundError:  # another run was first
            return
