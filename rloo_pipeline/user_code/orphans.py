"""Finds and ends processes that user code leaves behind: those in a session of their own, whose parent has ended."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2) option that makes this process adopt descendants whose parent dies."""
MARK = "RLOO_SCORED_BY"
"""Environment variable that marks workers and everything that they start; its value is the id of the scoring
process.
"""


def adopt_orphans() -> frozenset[int]:
    """Makes this process adopt processes that its workers leave behind. Returns its current children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return frozenset(_children())


def reap_group(leader: int) -> None:
    """Waits until no process of a killed group is left that this process may kill, if it adopts orphans.

    Others are those of another user, as `sudo` starts them.
    """
    with suppress(ProcessLookupError, PermissionError, ChildProcessError):
        while True:
            os.killpg(leader, 0)  # is one left? Its id may be another group's by now, so no signal
            os.waitpid(-leader, 0)


def reap_orphans(others: frozenset[int]) -> None:
    """Reaps orphans that have ended; `others` are children of this process that stay."""
    for child, (session, _) in _children().items():
        if child not in others and session != os.getsid(0):
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def end_orphans(others: frozenset[int]) -> None:
    """Kills orphans: processes that dead workers left behind and that this process adopted, with their children.

    An orphan has our marker in its environment, or is in a different session than this process.

    Args:
        others: children that this process had when it called `adopt_orphans`; they stay alive.
    """
    mark = f"{MARK}={os.getpid()}".encode()
    while orphans := [
        child
        for child, (session, environment) in _children().items()
        if child not in others and (session != os.getsid(0) or mark in environment.split(b"\0"))
    ]:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it has ended, or runs as another user
                others |= {pid}
        for pid in {*orphans} - others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> dict[int, tuple[int, bytes]]:
    """The session and environment of each child of this process."""
    children = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited meanwhile
            parent, _, session = file.read_text().rpartition(") ")[2].split()[1:4]
            if int(parent) == os.getpid():
                environment = b""
                with suppress(ProcessLookupError):  # it is exiting, and its own children become ours only after that
                    environment = (file.parent / "environ").read_bytes()
                children[int(file.parent.name)] = int(session), environment
    return children
