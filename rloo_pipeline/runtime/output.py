"""Output of a process: messages of this package go to the terminal, everything goes to the log file."""

import contextlib
import fcntl
import logging
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.logging import RichHandler

from rloo_pipeline.errors import printable
from rloo_pipeline.runtime import cost, progress, ranks


class _PrintableFormatter(logging.Formatter):
    """Formats messages and tracebacks without control characters, since they may quote a model's text. The run's name
    precedes every message except errors, which Snakemake's process recognizes by their beginning.
    """

    def __init__(self, form: str, run: str = "") -> None:
        super().__init__(form)
        self._before = f"{run}: " if run else ""

    def format(self, record: logging.LogRecord) -> str:
        return printable((self._before if record.levelno < logging.ERROR else "") + super().format(record))


def has_reader() -> bool:
    """False if standard output is a pipe whose reader has ended, as in `rloo status | head -1`."""
    pipe = select.poll()
    pipe.register(1, 0)
    return not pipe.poll(0)


@contextlib.contextmanager
def standard_output_to(descriptor: int) -> Iterator[None]:
    """Redirects standard output and error to a descriptor during the block, and closes the descriptor.

    `route_output` may redirect them again inside the block; its copy of the terminal is also closed, since srun waits
    until no process holds the output of a step open.
    """
    saved, console = [os.dup(1), os.dup(2)], progress.console
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in zip((1, 2), saved, strict=True):
            os.dup2(original, number)
            os.close(original)
        if progress.console is not console:
            logging.getLogger("rloo").handlers.clear()
            progress.console.file.close()
            progress.console = console


def write_as_parent() -> None:
    """Makes this process write where its parent writes now; the parent may have begun another log since it started
    this process.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        with contextlib.suppress(OSError):  # a socket cannot be opened
            file = os.open(f"/proc/{os.getppid()}/fd/{number}", os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)


def route_output(log: Path | None) -> None:
    """Sends messages of this package to the terminal, and everything, including engine output, to the log file."""
    root, logger = logging.getLogger(), logging.getLogger("rloo")
    root.handlers.clear()
    logger.handlers.clear()
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    rank = os.environ.get("RANK")
    progress.run = _run_of(log)
    if log is not None:
        terminal = os.fdopen(os.dup(2), "w", buffering=1)
        # the first rank opens it again: in a file, neither may overwrite what the other has written since
        fcntl.fcntl(terminal, fcntl.F_SETFL, fcntl.fcntl(terminal, fcntl.F_GETFL) | os.O_APPEND)
        progress.console = Console(file=terminal)
        _redirect(log)
    elif rank == "0" and progress.TERMINAL in os.environ:
        progress.console = Console(file=_opened(Path(os.environ[progress.TERMINAL])))
        progress.run = os.environ.get(progress.RUN, "")
    logger.propagate = log is not None or rank is not None
    if logger.propagate:
        to_log = logging.StreamHandler(sys.stderr)
        to_log.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(to_log)
    if rank in (None, "0"):
        logger.addHandler(_terminal_handler(progress.run))


def _run_of(log: Path | None) -> str:
    """The run of an experiment that a stage's log belongs to, such as `sums/plain/0`; empty for a single run."""
    parts = () if log is None or log.is_absolute() else log.parts  # Snakemake gives a relative path
    if not {"results", "logs"} <= set(parts):
        return ""
    names = parts[parts.index("results") + 1 : parts.index("logs")]
    return "/".join(names) if len(names) > 1 else ""


def _opened(terminal: Path) -> IO[str]:
    """The terminal of another process. Progress only goes to the log if that is a socket, which cannot be opened: the
    output of services of systemd and of programs that Node.js starts.
    """
    try:
        return terminal.open("a", buffering=1)
    except OSError:
        return Path(os.devnull).open("a")


def _redirect(log: Path) -> None:
    """Redirects standard output and error of this process and its children to the log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _terminal_handler(run: str) -> logging.Handler:
    """A handler that prints through rich on a terminal, so that lines do not break a progress bar; plain otherwise."""
    console = progress.console
    handler: logging.Handler = logging.StreamHandler(console.file)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_time=False, show_level=False, markup=False)
    handler.setFormatter(_PrintableFormatter("%(message)s", run))
    of_launcher = ranks.FAILED in os.environ  # which shows the error of the rank that failed first
    handler.addFilter(lambda each: each.name != cost.LOGGER and not (of_launcher and each.levelno == logging.ERROR))
    return handler
