"""Makes Snakemake's cache between workflows safe for concurrent runs and against damaged entries.

If two runs store the same entry at once, Snakemake 9.27 moves the second one's folder into the first one's. Here, the
first entry stays and the second run uses it, since an entry's name has everything that decides its content. An entry
is checked before a run uses it; a damaged one is removed and made again. A run gets a folder of links to the files of
an entry: no run changes the time of another's folder, and readers that do not follow links find its subfolders.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import run_sources
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

TIMESTAMP = ".snakemake_timestamp"
"""Snakemake's file in a folder with the time of the job that made it."""


def refuse_unpinned(call: SnakemakeCall) -> None:
    """Raises: UserError: the cache is used for a run whose sources on the Hub may change."""
    if call.workflow.workflow_settings.cache and not all(map(run_sources.are_pinned, call.runs.configs.values())):
        raise UserError(
            "--cache: its key does not tell what the Hub has under a branch or a tag; give model.revision and the "
            "revision of each dataset as commits of 40 digits, or leave --cache out"
        )


def make_safe(call: SnakemakeCall) -> None:
    """Patches Snakemake's cache in this process if it is used (`--cache`)."""
    from snakemake.caching.local import OutputFileCache

    if call.workflow.workflow_settings.cache is None or OutputFileCache.store.__module__ == __name__:
        return
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
    """Moves a job's output into the cache, unless another run has stored a complete entry meanwhile.

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
                moved.rename(entry)  # never into an existing folder
                return
            except OSError:  # the folder exists by now; a file would replace an equal one
                if not entry.is_dir():
                    raise
                if not is_damaged(entry):
                    return
                discard(entry)


def link(output: Path, entry: Path, symlink: Any) -> None:
    """Makes an output of links to the files of an entry; its folders are the run's own, with their own times.

    Args:
        output: file or folder to make.
        entry: path in the cache.
        symlink: function that makes a new link.
    """
    if not entry.is_dir():
        symlink(entry, output)
        return
    output.mkdir(parents=True, exist_ok=True)
    for inner in sorted(entry.iterdir()):
        if inner.name != TIMESTAMP:
            link(output / inner.name, inner, symlink)


def is_damaged(entry: Path) -> bool:
    """True if a cache entry is not what a stage wrote; compares only sizes if blake3 is not installed."""
    try:
        if entry.is_dir():
            manifest.verify_manifest(entry)
        else:
            from rloo_pipeline.artifacts import tables

            tables.read(entry, tables.facts_in(entry)["kind"])
    except ImportError:
        return _sizes_differ(entry)
    except (UserError, OSError, ValueError, KeyError):
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
    """Removes an entry atomically."""
    with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
        try:
            entry.rename(Path(folder, entry.name))
        except FileNotFoundError:  # another run was first
            return
