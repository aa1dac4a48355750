"""Ends a stage when the Snakemake that started it has ended, since nobody would read its result.

After a kill -9, Snakemake's stages would otherwise keep running beside those of the next Snakemake, on the same GPU.
"""

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.runtime import process_end

VARIABLE = "RLOO_CONTROLLER"
"""Environment variable of jobs on Snakemake's machine: Snakemake's process id and PID namespace, as from `name`."""
_watched: set[int] = set()


def name() -> str:
    """Identifies this process in the form that VARIABLE has."""
    return f"{os.getpid()} {_namespace()}"


def watch(variable: str = VARIABLE) -> None:
    """Ends this process when the process that an environment variable names ends.

    Does nothing if it is not set or names a process of another container, or in workers, which watch it already.
    """
    pid, _, namespace = os.environ.get(variable, "").partition(" ")
    if pid and namespace == _namespace() and int(pid) not in _watched:
        end_with(int(pid), lambda: os._exit(1))


def end_with(pid: int, action: Callable[[], object]) -> None:
    """Calls `action` in a thread when a process has ended, or at once if it has ended already."""
    _watched.add(pid)
    try:
        handle = process_end.readable_after(pid)
    except ProcessLookupError:
        action()
        return

    def wait() -> None:
        select.select([handle], [], [])
        action()

    threading.Thread(target=wait, daemon=True).start()


def _namespace() -> str:
    """Identifies this boot of the machine, and the PID namespace."""
    proc = Path("/proc")
    return (proc / "sys/kernel/random/boot_id").read_text().strip() + f" {(proc / 'self/ns/pid').readlink()}"
