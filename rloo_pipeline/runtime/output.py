"""Where the words of a process go: our own lines to the terminal, everything to the log file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from rloo_pipeline.runtime import progress


@contextlib.contextmanager
def outputs_to(file: int) -> Iterator[None]:
    """A block in which standard output and error go to a descriptor, which is closed, as long as they are not turned
    elsewhere in it, which `prepare` does.
    """
    own = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), own, strict=True):
            os.dup2(before, number)
            os.close(before)


def route_output(log: Path | None) -> None:
    """Sends our own lines to the terminal, and everything, the engines' chatter included, to the log file."""
    root, own = logging.getLogger(), logging.getLogger("rloo")
    root.handlers.clear()
    own.handlers.clear()
    own.setLevel(logging.INFO)
    logging.captureWarnings(True)
    rank = os.environ.get("RANK")
    if log is not None:
        terminal = os.fdopen(os.dup(2), "w", buffering=1)
        progress.console = Console(file=terminal)
        _redirect(log)
    elif rank == "0" and progress.TERMINAL in os.environ:
        progress.console = Console(file=open(os.environ[progress.TERMINAL], "w", buffering=1))  # noqa: SIM115
    own.propagate = log is not None or rank is not None
    if own.propagate:
        to_log = logging.StreamHandler(sys.stderr)
        to_log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(to_log)
    if rank in (None, "0"):
        own.addHandler(_to_person())


def _redirect(log: Path) -> None:
    """Makes standard output and standard error of this process, and of what it starts, the log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _to_person() -> logging.Handler:
    """Lines for the person: through rich on a terminal, so that they do not tear a progress bar; plain otherwise."""
    if progress.console.is_terminal:
        return RichHandler(console=progress.console, show_path=False, show_time=False, show_level=False, markup=False)
    plain = logging.StreamHandler(progress.console.file)
    plain.setFormatter(logging.Formatter("%(message)s"))
    return plain
