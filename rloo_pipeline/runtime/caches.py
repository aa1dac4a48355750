"""The folder for the caches of engines and libraries, and a lock on caches that all nodes see."""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.errors import translate_write_errors
from rloo_pipeline.runtime import late_files, progress, scratch

OWN = ".rloo-"
"""Prefix of the files of `compiling`."""
PATIENCE = 1800.0
"""Seconds to wait for another job that is compiling; a node that died may leave its lock on the file server."""


def cache_folder() -> Path:
    """XDG_CACHE_HOME or ~/.cache; if this node cannot write there, a folder in the temporary directory."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # Path.home() fails for a user without one
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return scratch.user_folder() / f"rloo-{os.getuid()}"


def instructions() -> str:
    """The instructions of this processor, as a line of /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def for_snakemake() -> dict[str, str]:
    """The environment of a Snakemake process, which would fail if it could not write to its own cache.

    Raises:
        UserError: the disk or quota of the cache folder is full. Another folder would lack the models in this one.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with translate_write_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 12))
    return os.environ | {"XDG_CACHE_HOME": str(folder)}


@contextlib.contextmanager
def compiling(folder: Path, key: str) -> Iterator[None]:
    """Lets one process at a time, over all nodes, compile into `folder`; the others wait before their block.

    This is for libraries that write files in place, where another process could read a half-written one. Once a block
    with this key has succeeded, later ones have nothing to compile and do not wait. If a process was killed in its
    block, the next one removes its files. If the lock cannot be taken, because the file system has none or PATIENCE
    has run out, nobody waits and nothing is removed.

    Args:
        folder: a folder that only these libraries write into.
        key: file name that identifies the compiled code.
    """
    complete, begun = folder / f"{OWN}{key}", folder / f"{OWN}before"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as until_compiled:
        alone = False
        if not complete.exists():
            with contextlib.suppress(OSError):  # the lock of another user of the same folder
                alone = _locks(until_compiled.enter_context((folder / f"{OWN}lock").open("a")).fileno())
        if late_files.exists(complete) or not alone:
            until_compiled.close()
            yield
            return
        if begun.exists():
            _remove_others(folder, {*json.loads(begun.read_text())})
        temporary = folder / f"{OWN}new"
        temporary.write_text(json.dumps(sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*"))))
        temporary.replace(begun)
        yield
        begun.unlink()  # first: if a kill left both files, the next job would remove what is complete
        complete.touch()


def _locks(file: int) -> bool:
    """Locks a file for this process, on NFS too; the kernel unlocks it when the process ends. Returns False if
    the file cannot be locked.
    """
    end = time.monotonic() + PATIENCE
    with progress.announcing("waiting for another job, which is compiling"):
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


def _remove_others(folder: Path, paths: set[str]) -> None:
    """Removes all files and folders, at any depth, except these and our own."""
    for entry in sorted(folder.rglob("*"), reverse=True):  # what is in a folder comes before it
        if str(entry.relative_to(folder)) not in paths and not entry.name.startswith(OWN):
            entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
