"""Makes Snakemake's cache between workflows safe for concurrent runs and against damaged entries.

If two runs store the same entry at once, Snakemake 9.27 moves the second folder into the first. With this patch, the
first entry stays and the second run uses it; an entry's name covers everything that decides its content. Entries are
checked before use, and damaged ones are removed and made again. A run gets a folder with links to an entry's files, so
that no run changes the modification time of another's folder, and readers that do not follow links find the subfolders.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.files import TIMESTAMP, read_artifact
from rloo_pipeline.errors import UserError, raise_unless_missing
from rloo_pipeline.snakemake_ext import run_sources
from rloo_pipeline.snakemake_ext.replacing import replaces
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


def refuse_unpinned(call: SnakemakeCall) -> None:
    """Refuses the cache for a run whose sources on the Hub may change."""
    if call.workflow.workflow_settings.cache and not all(map(run_sources.are_pinned, call.runs.configs.values())):
        raise UserError(
            "--cache: its key does not cover what a branch or tag on the Hub contains; give model.revision and the "
            "revision of each dataset as commits of 40 digits, or leave --cache out"
        )


def make_safe(call: SnakemakeCall) -> None:
    """Patches Snakemake's cache in this process if it is used (`--cache`)."""
    from snakemake.caching.local import OutputFileCache

    if call.workflow.workflow_settings.cache is None:
        return

    @replaces(OutputFileCache, "store")
    async def store(_: Any, self: Any, job: Any) -> None:
        for output, entry in await self.get_outputfiles_and_cachefiles(job):
            self.check_writeable(entry)
            keep(output, entry, self.set_permissions)
            link(output, entry, self.symlink)

    @replaces(OutputFileCache, "fetch")
    async def fetch_whole(fetch: Any, self: Any, job: Any) -> None:
        pairs = await self.get_outputfiles_and_cachefiles(job)
        for _, entry in pairs:
            if entry.exists() and is_damaged(entry):
                discard(entry)
        if not all(entry.is_dir() for _, entry in pairs):
            await fetch(self, job)  # the entry is a file, or missing
            return
        for output, entry in pairs:
            self.check_readable(entry)
            link(output, entry, self.symlink)


def keep(output: Path, entry: Path, set_permissions: Any) -> None:
    """Moves a job's output into the cache, unless another run has meanwhile stored a complete entry.

    Args:
        output: file or folder that the job wrote.
        entry: path in the cache.
        set_permissions: function that makes a file or folder readable for others who share the cache.
    """
    with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
        moved = Path(folder, entry.name)
        shutil.move(output, moved, copy_function=shutil.copy)  # the cache may be on another file system
        set_permissions(moved)
        while True:
            try:
                moved.rename(entry)  # rename never moves it into an existing folder
                return
            except OSError:  # another run stored the folder first (a file would just replace an equal one)
                if not entry.is_dir():
                    raise
                if not is_damaged(entry):
                    return
                discard(entry)


def link(output: Path, entry: Path, symlink: Any) -> None:
    """Makes an output from links to the files of an entry. Folders are the run's own, with their own times.

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
    """True if a cache entry differs from what the stage wrote. Compares only sizes if blake3 is not installed."""
    try:
        if entry.is_dir():
            manifest.verify_manifest(entry)
        else:
            from rloo_pipeline.artifacts import tables

            tables.read(entry, tables.facts_in(entry)["kind"])
    except ImportError:
        return _sizes_differ(entry)
    except (UserError, OSError, ValueError, KeyError) as error:
        raise_unless_missing(error, entry)  # other runs link to the entry
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
        except FileNotFoundError:  # another run was faster
            return
