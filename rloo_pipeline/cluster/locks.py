"""Snakemake's locks after a kill: cleared when their owner is provably gone, so that the same command goes on.

Snakemake marks what a process works on by files that a killed process leaves behind. Here the main process of each run
also holds a lock of the operating system (flock), which ends with the process. Whoever gets the locks of all runs of a
folder knows that no other main process of this host is alive there; marks that were left on this host are then stale.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import NamedTuple

_held: list[int] = []


class Hold(NamedTuple):
    """Whether this process may write, and what there is to say about it."""

    alone: bool
    message: str = ""


def hold(folder: Path, run: str) -> Hold:
    """Takes the lock of a run for the life of this process, and clears marks that are provably stale.

    Args:
        folder: the working folder of Snakemake; several runs may be at work in it.
        run: name of the run.
    """
    hidden = folder / ".snakemake"
    hidden.mkdir(exist_ok=True)
    own = hidden / f"rloo-{run}.lock"
    handle = os.open(own, os.O_RDWR | os.O_CREAT, 0o644)
    owner = os.read(handle, 1000).decode()
    if not _taken(handle):
        return Hold(False)
    _held.append(handle)
    marks = [mark for mark in (hidden / "locks").glob("*") if mark.is_file()]
    if marks and owner and not owner.startswith(f"{socket.gethostname()} "):
        return Hold(False, f"locked by a run on another host ({owner}); if it is dead, run `snakemake --unlock`")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{socket.gethostname()} process {os.getpid()}".encode(), 0)
    if not marks or not all(_free(other) for other in hidden.glob("rloo-*.lock") if other != own):
        return Hold(True)
    for mark in marks:
        mark.unlink(missing_ok=True)
    return Hold(True, f"cleared the lock of a killed run ({owner or 'unknown owner'})")


def _taken(handle: int) -> bool:
    """Takes a lock if it is free; a file system without locks counts as free, and Snakemake's marks must do there."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _free(path: Path) -> bool:
    """Whether nobody on this host holds a run's lock, as far as the file system can tell."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
