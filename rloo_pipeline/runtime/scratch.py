"""The folder for temporary files of a process and its children, which is removed however they end.

Libraries leave files in TMPDIR (vLLM's `vllm_dist_*`, torchrun's folders), and a killed process leaves all of its own.
So TMPDIR is set to a folder with a lock file beside it. Each process that uses the folder holds a shared lock, which
the kernel releases when the process ends. The next process on this host that makes such a folder removes those that
nobody has locked. Other hosts may share TMPDIR without seeing these locks, so the lock file names its host. On a file
system without locks, folders of killed processes stay. A folder also stays while a process that outlives its killed
owner can still write into it or recreate it.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

LOCK = ".rloo-lock-"
"""Prefix of the names of lock files, followed by the name of the folder."""
EXCHANGE = "RLOO_EXCHANGE"
"""Environment variable with the controller's folder for policies on each node (artifacts/node_files.py)."""
_locks: list[int] = []
_own: list[tuple[int, Path]] = []
_held: list[Path] = []
"""The folder of another process in which this one has its temporary files, if it is in one."""


def use(folder: Path | None = None) -> None:
    """Sets TMPDIR, also for child processes, to a folder that is removed when they end; keeps an existing such folder.

    Args:
        folder: a new folder in TMPDIR; None makes one.
    """
    if hold():
        return
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="rloo-"))
    claim(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def hold() -> bool:
    """Keeps the folder that TMPDIR is in as long as this process lives; returns False if there is none."""
    around = _folder_around(Path(tempfile.gettempdir()))
    if around and not _locks:
        _lock(os.open(_lock_of(around), os.O_RDONLY))
        _held.append(around)
    return around is not None


def claim(folder: Path) -> None:
    """Has a folder removed when this process ends, or later; also removes those beside it whose processes have ended.

    Does nothing inside such a folder, which is removed as a whole.
    """
    if _folder_around(folder):
        return
    remove_abandoned(folder.parent)
    temporary = folder / LOCK
    lock = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(lock, socket.gethostname().encode())
    _lock(lock)
    temporary.rename(_lock_of(folder))  # the lock exists before anyone can see the file
    _own.append((os.getpid(), folder))
    atexit.register(_remove_own, *_own[-1])  # other exit handlers may still need the other folders


def remove() -> None:
    """Removes the folders of this process (not of one that forked it); for processes that end without exit handlers."""
    for owner, folder in _own:
        _remove_own(owner, folder)


def _remove_own(owner: int, folder: Path) -> None:
    if owner == os.getpid():
        _remove(folder)


def leave() -> None:
    """For a process that may outlive the owner of the folder: removes the folder, if no other process uses it, and the
    owner's folder of `exchange`. Call it before the process ends.
    """
    tops = [user_folder(), *(Path(store).parent for store in [os.environ.get(EXCHANGE)] if store)]
    while _locks:
        os.close(_locks.pop())
    for folder in _held:
        if not _lock_of(folder).exists():  # its owner has removed it; an import of torch may have made it anew since
            shutil.rmtree(folder, ignore_errors=True)
    for top in tops:
        remove_abandoned(top)


def user_folder() -> Path:
    """The user's folder for temporary files, which contains those of `use`."""
    around = _held[0] if _held else _folder_around(Path(tempfile.gettempdir()))
    return around.parent if around else Path(tempfile.gettempdir())


def remove_abandoned(top: Path) -> None:
    """Removes the folders in `top` whose processes have all ended."""
    for lock in top.glob(f"{LOCK}*"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if file.read() == socket.gethostname():
                    _remove(top / lock.name.removeprefix(LOCK))
        except OSError:  # in use, or already removed
            continue


def _folder_around(folder: Path) -> Path | None:
    """The folder of `use` or `claim` that contains this folder, or is it."""
    return next((parent for parent in (folder, *folder.parents) if _lock_of(parent).exists()), None)


def _lock(handle: int) -> None:
    """Takes a shared lock on a file, if the file system has locks. This process keeps it until `leave`."""
    _locks.append(handle)
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)


def _lock_of(folder: Path) -> Path:
    return folder.parent / f"{LOCK}{folder.name}"


def _remove(folder: Path) -> None:
    """Removes a folder, then its lock. If something still writes into the folder, the next process tries again."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        _lock_of(folder).unlink(missing_ok=True)
