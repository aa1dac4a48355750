"""A file that tells when a process has ended: the kernel's own (a pidfd), or one that a thread writes to.

Linux before 5.3, as on RHEL 8, has no pidfd_open, and a Python that was built there does not know it.
"""

import contextlib
import multiprocessing.connection
import os
import threading
import time
from pathlib import Path

POLL = 0.1
"""Seconds between two checks of a process, if the kernel has no pidfds."""


def readable_after(pid: int) -> int:
    """A file descriptor that becomes readable when a process has ended, whether or not its parent has waited for it.

    Raises:
        ProcessLookupError: the process does not exist.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        reader, writer = os.pipe()
    threading.Thread(target=_watch, args=(pid, writer), daemon=True).start()
    return reader


def wait(pid: int, seconds: float) -> None:
    """Waits until a process has ended, at most this long."""
    try:
        handle = readable_after(pid)
    except ProcessLookupError:
        return
    multiprocessing.connection.wait([handle], max(0.0, seconds))  # select.select takes no number above 1023
    os.close(handle)


def _watch(pid: int, writer: int) -> None:
    while _is_alive(pid):
        time.sleep(POLL)
    with contextlib.suppress(BrokenPipeError):  # no one waits any more
        os.write(writer, b"\0")  # closing it is not enough, since forked processes have it open too
    os.close(writer)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
