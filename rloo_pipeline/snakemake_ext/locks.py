"""Clears Snakemake's locks after a kill if their owner has provably ended, so that the same command works again.

Snakemake locks a folder with marker files, and a killed process leaves them behind. Here the main process of each run
also holds an operating system lock (flock), which is released when the process ends. A process that gets the locks of
all runs in a folder knows that no other main process on this host is alive there, so markers from this host are stale.
While another run is alive, only markers that name files of this run and none of the other are known to be stale.
It also locks the run's own folder, which may be reachable from other working folders. Locks of a process on another
host may be invisible here. Such a process is known to have ended only if it ran in a SLURM job that SLURM says has
ended, or that is this very job after a requeue. On a file system without locks, a process of this host has ended if its
process id is free.
"""

import atexit
import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from snakemake.logging import logger

from rloo_pipeline.cluster import slurm
from rloo_pipeline.config.run_set import RESULTS
from rloo_pipeline.errors import UserError
from rloo_pipeline.report import origin
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

OWNER = "RLOO_RUN_OWNER"
"""Environment variable, for processes that the owner of a run's lock starts, with the owner's name as in the lock
file.
"""
ASKING = 0.1
"""Seconds after which a lock is tried again: runs that start, and `rloo watch`, ask for it whether its run is alive."""
_held: list[int] = []


class Hold(NamedTuple):
    """State of the lock: True if this process may write to the run, and a message for the terminal."""

    alone: bool
    message: str = ""


def hold_run(call: SnakemakeCall) -> None:
    """Takes the run's lock before Snakemake checks its own. Dry runs and jobs take none."""
    if call.dry_run:
        return
    origin.note_commit()  # in a job, too: sbatch may have passed on nothing
    if not call.main:
        return
    call.alone, call.owner = held = hold(Path.cwd(), call.runs.name, call.results)
    if held.alone and held.message:
        logger.info(held.message)


def refuse_second_process(call: SnakemakeCall) -> None:
    """Refuses to start if another process is working on the run that has skipped or cleared Snakemake's own lock, or
    not taken it yet.
    """
    if not call.alone:
        leave_to_owner(call.workflow.persistence)
        raise UserError(call.owner)


def hold(folder: Path, run: str, results: Path = Path(RESULTS)) -> Hold:
    """Takes a run's lock for the lifetime of this process, and removes provably stale markers.

    Args:
        folder: Snakemake's working folder, which several runs may use at once.
        run: name of the run.
        results: folder of the runs' folders, relative to `folder`; a module's `prefix:` changes it.

    Raises:
        UserError: the folder is not writable, its name has a line break, or the lock belongs to another user.
    """
    if "\n" in str(folder):
        raise UserError(f"{str(folder)!r}: SLURM and Snakemake misread the line break in its name; rename it")
    hidden, place = folder / ".snakemake", results / run
    own = hidden / f"rloo-{run}.lock"
    try:
        hidden.mkdir(exist_ok=True)
        handle = os.open(own, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if isinstance(error, PermissionError) and own.exists():
            raise UserError(
                f"{place}: started by {_user_of(own)}, but you cannot write to {own}; continue a copy "
                "(`rloo adopt`), or let the owner share the folder (chmod -R g+w)"
            ) from None
        raise UserError(f"{folder}: a run needs a folder in which it can write ({error.strerror})") from None
    owner = os.read(handle, 1000).decode(errors="replace")
    locked = _take(handle)
    if not locked and owner and owner == os.environ.get(OWNER):
        return Hold(True)  # the call with which the owner finishes the run
    if locked is False:
        return Hold(False, f"{place}: {owner or 'another process'} is at work on it, or suspended; end it first")
    _held.append(handle)
    markers = [marker for marker in (hidden / "locks").glob("*") if marker.is_file()]
    # any Snakemake process that ends removes the markers of all runs, and some file systems lock per host only
    if owner and not _has_ended(owner, locked):
        remedy = f"if it has ended, delete {own} and repeat the command"
        return Hold(False, f"{place}: locked by a process that may be alive ({owner}); {remedy}")
    if not _lock_results(folder / place):
        return Hold(False, f"{place}: a process in another working folder is at work on it; end it first")
    os.environ[OWNER] = _this_process()
    os.ftruncate(handle, 0)
    os.pwrite(handle, os.environ[OWNER].encode(), 0)
    atexit.register(_leave, handle, os.environ[OWNER])
    files = hidden.glob("rloo-*.lock") if markers else ()
    others = {other.name[5:-5] for other in files if other != own and not _is_free(other)}
    stale = [marker for marker in markers if not others or _is_of(marker, run, others)]
    for marker in stale:
        marker.unlink(missing_ok=True)
    return Hold(True, f"cleared the lock of a killed run ({owner or 'unknown owner'})" if stale else "")


def _is_of(marker: Path, run: str, others: set[str]) -> bool:
    """True if a marker names files of a run and none of other runs. A marker has a path in each line."""
    try:
        names = {name for line in marker.read_text().splitlines() for name in Path(line).parts}
    except OSError:  # another Snakemake process has just ended, or another user's file cannot be read
        return False
    return run in names and names.isdisjoint(others)


def _lock_results(run: Path) -> bool:
    """Locks a run's folder, which several working folders may link to. Returns False if another process has locked
    it.
    """
    try:
        handle = os.open(run, os.O_RDONLY)
    except OSError:  # it does not exist yet, or its owner does not let others in
        return True
    _held.append(handle)
    return _take(handle) is not False


def _user_of(path: Path) -> str:
    """The owner of a file, by name or, if this machine does not know the name, by number."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def leave_to_owner(persistence: Any) -> None:
    """Makes Snakemake remove only this process's markers at its end, since others belong to the lock's owner.

    Args:
        persistence: Snakemake's persistence, in a process that may not write to the run.
    """
    for marker in getattr(persistence, "_lockfile", {}).values():
        Path(marker).unlink(missing_ok=True)
    persistence.unlock = persistence.noop


def _leave(handle: int, owner: str) -> None:
    """Removes the name of a process that exits normally, unless a later process has written its own."""
    with suppress(OSError):  # the file system may be read-only by now; the name is then that of a killed process
        if os.pread(handle, 1000, 0).decode(errors="replace") == owner:
            os.ftruncate(handle, 0)


def _host() -> str:
    """Start of the names of owners on this host."""
    return f"{socket.gethostname()} "


def _this_process() -> str:
    number = slurm.own_job()
    return f"{_host()}process {os.getpid()}" + (f" of SLURM job {number}" if number else "")


def _has_ended(owner: str, locked: bool | None) -> bool:
    """True if an owner has provably ended. `locked` says if its file could be locked; None if that is unknown."""
    if owner.startswith(_host()):
        return bool(locked) or not Path("/proc", owner.split()[2]).exists()
    job = _job_of(owner)
    try:  # this very job may have been requeued
        return job is not None and (job == slurm.own_job() or slurm.job(job) is None)
    except UserError:  # SLURM is not available here
        return False


def _job_of(owner: str) -> str | None:
    """The SLURM job that an owner runs in, if it does."""
    match = re.search(r" of SLURM job (\d+)$", owner)
    return match[1] if match else None


def _take(handle: int) -> bool | None:
    """Takes a lock as `_lock` does, but asks twice, since `rloo watch` may just have looked at it."""
    locked = _lock(handle)
    if locked is False:
        time.sleep(ASKING)
        locked = _lock(handle)
    return locked


def _lock(handle: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Takes a lock if it is free; None if the file system does not support locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def may_be_alive(run: Path) -> bool:
    """False if no process works on the run or experiment in this folder. Takes no lock for longer than it asks, and
    asks SLURM at most once a minute.
    """
    own = run.absolute().parent.parent / ".snakemake" / f"rloo-{run.name}.lock"
    if not own.exists() or _is_locked(run):
        return True
    locked, owner = _look(own)
    if locked is False:
        return True
    if (job := _job_of(owner)) and not owner.startswith(_host()):
        return slurm.may_be_queued(job)
    return bool(owner) and not _has_ended(owner, locked)


def _is_free(path: Path) -> bool:
    """True if no process holds a run's lock, as far as the file system and SLURM can tell from this host."""
    locked, owner = _look(path)
    return locked is not False and (not owner or _has_ended(owner, locked))


def _look(path: Path) -> tuple[bool | None, str]:
    """Tries a run's lock. Returns what `_lock` does, and the owner in its file."""
    try:
        with path.open(errors="replace") as file:
            return _lock(file.fileno(), fcntl.LOCK_SH), file.read()
    except OSError:  # another user's, which cannot be read
        return False, ""


def _is_locked(run: Path) -> bool:
    """True if a process, maybe in another working folder, has locked a run's folder."""
    try:
        handle = os.open(run, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _lock(handle, fcntl.LOCK_SH) is False
    finally:
        os.close(handle)
