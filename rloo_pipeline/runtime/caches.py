"""The folder for the caches of engines and libraries, and who may write into one that all nodes see."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.runtime import progress, scratch

OWN = ".rloo-"
"""Prefix of the files of `compiling`."""
PATIENCE = 1800.0
"""Seconds to wait for another job that compiles; a node that died may leave its lock on a server."""


def cache_folder() -> Path:
    """XDG_CACHE_HOME or ~/.cache; a folder in the temporary directory where this node cannot write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return scratch.user_folder() / f"rloo-{os.getuid()}"


@contextlib.contextmanager
def compiling(folder: Path, key: str) -> Iterator[None]:
    """Lets one process of all nodes compile into `folder` at a time, in the block; others wait.

    For libraries that write files in place, of which another process could read half. Once a block with this key has
    succeeded, nothing is compiled in a later one, and none waits. If a process was killed in its block, the next one
    removes what it left. Where the file system has no locks, or after PATIENCE, nobody waits and nothing is removed.

    Args:
        folder: a folder that only such libraries write into.
        key: tells what is compiled; a file name.
    """
    complete, begun = folder / f"{OWN}{key}", folder / f"{OWN}begun"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as until_compiled:
        alone = False
        if not complete.exists():
            alone = _locks(until_compiled.enter_context((folder / f"{OWN}lock").open("a")).fileno())
        if complete.exists() or not alone:
            until_compiled.close()
            yield
            return
        if begun.exists():
            _remove_others(folder, {*json.loads(begun.read_text())})
        temporary = folder / f"{OWN}new"
        temporary.write_text(json.dumps(sorted(entry.name for entry in folder.iterdir())))
        temporary.replace(begun)
        yield
        complete.touch()
        begun.unlink()


def _locks(file: int) -> bool:
    """Locks a file for this process; the kernel unlocks it when the process ends, and NFS knows such locks. False where
    that does not work.
    """
    end = time.monotonic() + PATIENCE
    with progress.announcing("another job compiles, which this one waits for"):
        while time.monotonic() < end:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process has it
                time.sleep(0.1)
            except OSError:
                return False
            else:
                return True
    return False


def _remove_others(folder: Path, names: set[str]) -> None:
    """Removes all entries but these and our own."""
    for entry in folder.iterdir():
        if entry.name not in names and not entry.name.startswith(OWN):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
