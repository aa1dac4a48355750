"""Snakemake's locks after a kill: cleared when their owner is provably gone, so that the same command goes on.

Snakemake marks what a process works on by files that a killed process leaves behind. Here the main process of each run
also holds a lock of the operating system (flock), which ends with the process. Whoever gets the locks of all runs of a
folder knows that no other main process of this host is alive there; marks that were left on this host are then stale.
Of a process on another host this can be known only where it was in a SLURM job: SLURM says whether that job has ended,
or has become this one by going back into the queue.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.cluster import slurm
from rloo_pipeline.errors import UserError

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
    if marks and owner and not (_of_this_host(owner) or _job_ended(owner)):
        return Hold(False, f"locked by a run on another host ({owner}); if it is dead, run `snakemake --unlock`")
    os.ftruncate(handle, 0)
    os.pwrite(handle, _me().encode(), 0)
    atexit.register(os.ftruncate, handle, 0)  # nobody's, when it ends by itself
    if not marks or not all(_free(other) for other in hidden.glob("rloo-*.lock") if other != own):
        return Hold(True)
    for mark in marks:
        mark.unlink(missing_ok=True)
    return Hold(True, f"cleared the lock of a killed run ({owner or 'unknown owner'})")


def _me() -> str:
    number = slurm.own_job()
    return f"{socket.gethostname()} process {os.getpid()}" + (f" of SLURM job {number}" if number else "")


def _of_this_host(owner: str) -> bool:
    return owner.startswith(f"{socket.gethostname()} ")


def _job_ended(owner: str) -> bool:
    """Whether the owner was in a SLURM job that runs no more, or in an earlier time of this process's own job."""
    found = re.search(r" of SLURM job (\d+)$", owner)
    if found is None:
        return False
    try:
        return found[1] == slurm.own_job() or slurm.job(found[1]) is None
    except UserError:  # SLURM cannot be asked here
        return False


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
    """Whether nobody holds a run's lock, as far as the file system of this host and SLURM can tell."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        owner = file.read()
    return not owner or _of_this_host(owner) or _job_ended(owner)
