"""The folder for temporary files of a process and its children, which is removed however they end.

Libraries leave files in TMPDIR (vLLM's `vllm_dist_*`, torchrun's folders), and a killed process leaves all of its own.
So TMPDIR is set to a folder with a locked file. The kernel releases the lock when the process is killed, and the next
process that takes such a folder removes those whose lock is free.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".rloo-lock"
_locks: list[int] = []
_own: list[Path] = []


def use(folder: Path | None = None) -> None:
    """Sets TMPDIR of this process and its children to a folder that ends with it; does nothing inside of such a folder.

    Args:
        folder: a new folder in TMPDIR, which its owner removes at the end; None makes one that is removed at exit.
    """
    if is_inside():
        return
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="rloo-"))
        _own.append(folder)
        atexit.register(remove)
    claim(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def claim(folder: Path) -> None:
    """Marks a folder in TMPDIR to be removed after this process; also removes those of processes that have ended.

    Does nothing inside of such a folder, which is removed as a whole.
    """
    if is_inside() or (folder / LOCK).exists():
        return
    remove_abandoned(folder.parent)
    temporary = folder / f"{LOCK}.new"
    lock = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    temporary.rename(folder / LOCK)  # locked before anyone can see it
    _locks.append(lock)


def is_inside() -> bool:
    """Whether TMPDIR is in a folder that is removed with its process."""
    return user_folder() != Path(tempfile.gettempdir())


def remove() -> None:
    """Removes the folder that this process made, if it did; for processes that end without exit handlers."""
    for folder in _own:
        shutil.rmtree(folder, ignore_errors=True)


def user_folder() -> Path:
    """The folder for temporary files as the user has set it, in which those of `use` are."""
    folder = Path(tempfile.gettempdir())
    return next((parent.parent for parent in (folder, *folder.parents) if (parent / LOCK).exists()), folder)


def remove_abandoned(top: Path) -> None:
    """Removes the folders in `top` whose processes have all ended."""
    for lock in top.glob(f"*/{LOCK}"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # in use, or already removed
            continue
