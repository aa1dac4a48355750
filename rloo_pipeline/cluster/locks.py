"""Snakemake's locks after a kill: cleared when their owner is provably gone, so that the same command goes on.

Snakemake marks a working folder as locked by files that a killed process leaves behind. Here the main process also
holds a lock of the operating system (flock), which ends with the process. Whoever gets that lock knows that no other
main process of this host is alive; if the marks are still there and were left on this host, they are stale.
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


def hold(folder: Path) -> Hold:
    """Takes the lock of the working folder for the life of this process, and clears marks that are provably stale.

    Where another run is at work nothing is touched: Snakemake's own marks stop this one.
    """
    hidden = folder / ".snakemake"
    hidden.mkdir(exist_ok=True)
    handle = os.open(hidden / "rloo.lock", os.O_RDWR | os.O_CREAT, 0o644)
    owner = os.read(handle, 1000).decode()
    marks = [mark for mark in (hidden / "locks").glob("*") if mark.is_file()]
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Hold(False)
    except OSError:
        return Hold(not marks)  # this file system has no locks: Snakemake's own marks must do
    if marks and owner and not owner.startswith(f"{socket.gethostname()} "):
        return Hold(False, f"locked by a run on another host ({owner}); if it is dead, run `snakemake --unlock`")
    for mark in marks:
        mark.unlink(missing_ok=True)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{socket.gethostname()} process {os.getpid()}".encode(), 0)
    _held.append(handle)
    return Hold(True, f"cleared the lock of a killed run ({owner or 'unknown owner'})" if marks else "")
