"""Snakemake's locks after a kill: cleared when their owner is provably gone, so that the same command goes on.

Snakemake marks a working folder as locked by files that a killed process leaves behind. Here the main process also holds a lock
of the operating system (flock), which ends with the process. Whoever gets that lock knows that no other main process of this
host is alive; if the marks are still there and were left on this host, they are stale.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from rloo_pipeline.errors import UserError

_held: list[int] = []


def hold(folder: Path) -> str | None:
    """Takes the lock for the life of this process; says what it cleared, if anything.

    Args:
        folder: the working folder of the run.

    Raises:
        UserError: a run on another host left its marks; only a person can know whether it is alive.
    """
    hidden = folder / ".snakemake"
    hidden.mkdir(exist_ok=True)
    handle = os.open(hidden / "rloo.lock", os.O_RDWR | os.O_CREAT, 0o644)
    owner = os.read(handle, 1000).decode()
    marks = [mark for mark in (hidden / "locks").glob("*") if mark.is_file()]
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None  # another run is at work, or this file system has no locks: Snakemake's own marks speak then
    if marks and owner and not owner.startswith(f"{socket.gethostname()} "):
        raise UserError(f"{folder}: locked by a run on another host ({owner}); if it is dead, run `snakemake --unlock`")
    for mark in marks:
        mark.unlink(missing_ok=True)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{socket.gethostname()} process {os.getpid()}".encode(), 0)
    _held.append(handle)
    return f"cleared the lock of a killed run ({owner or 'unknown owner'})" if marks else None
