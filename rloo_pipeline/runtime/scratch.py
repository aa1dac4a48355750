"""The folder for temporary files of a process and its children, which is removed however they end.

Libraries leave files in TMPDIR (vLLM's `vllm_dist_*`, torchrun's folders), and a killed process leaves all of its own.
So TMPDIR is set to a folder with a locked file beside it. The kernel releases the lock when the process is killed, and
the next process that takes such a folder removes those whose lock is free. A file inside would be lost when a process
that outlives the owner for a moment writes into a folder that is being removed.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".rloo-lock-"
"""Prefix of the names of locked files; the name of the folder follows."""
_locks: list[int] = []
_own: list[tuple[int, Path]] = []


def use(folder: Path | None = None) -> None:
    """Sets TMPDIR of this process and its children to a folder that ends with it; does nothing inside of such a folder.

    Args:
        folder: a new folder in TMPDIR; None makes one.
    """
    if is_inside():
        return
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="rloo-"))
    claim(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def claim(folder: Path) -> None:
    """Removes a folder in TMPDIR at the end of this process, or after it; also those of processes that have ended.

    Does nothing inside of such a folder, which is removed as a whole.
    """
    if is_inside() or _lock_of(folder).exists():
        return
    remove_abandoned(folder.parent)
    temporary = folder / LOCK
    lock = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    temporary.rename(_lock_of(folder))  # locked before anyone can see it
    _locks.append(lock)
    _own.append((os.getpid(), folder))
    atexit.register(remove)


def is_inside() -> bool:
    """Whether TMPDIR is in a folder that is removed with its process."""
    return user_folder() != Path(tempfile.gettempdir())


def remove() -> None:
    """Removes the folders of this process (not of one that forked it); for processes that end without exit handlers."""
    for owner, folder in _own:
        if owner == os.getpid():
            _remove(folder)


def user_folder() -> Path:
    """The folder for temporary files as the user has set it, in which those of `use` are."""
    folder = Path(tempfile.gettempdir())
    return next((parent.parent for parent in (folder, *folder.parents) if _lock_of(parent).exists()), folder)


def remove_abandoned(top: Path) -> None:
    """Removes the folders in `top` whose processes have all ended."""
    for lock in top.glob(f"{LOCK}*"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(top / lock.name.removeprefix(LOCK))
        except OSError:  # in use, or already removed
            continue


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{LOCK}{folder.name}"


def _remove(folder: Path) -> None:
    """Removes a folder, then its lock: where something still writes into the folder, the next process tries again."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        _lock_of(folder).unlink(missing_ok=True)
