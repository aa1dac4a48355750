"""Progress of a stage: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")
log = logging.getLogger("rloo")
console = Console(stderr=True)
SECONDS_BETWEEN_LINES = 15.0
STYLE = "RLOO_PROGRESS"
"""Environment variable; with the value `lines`, progress is shown as lines on a terminal too."""
TERMINAL = "RLOO_TERMINAL"
"""Environment variable: path of the terminal on which rank 0 shows its progress."""


class Counter:
    """Counts finished items of a known total and shows progress."""

    def __init__(self, what: str, total: int, bar: Progress | None) -> None:
        self.what, self.total, self.done, self.bar = what, total, 0, bar
        self.task = bar.add_task(what, total=total) if bar else None
        self.started = self.printed = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Adds `count` finished items."""
        self.done += count
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.done)
        elif (now := time.monotonic()) - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = now
            left = (self.total - self.done) * (now - self.started) / max(self.done, 1)
            log.info("%s: %d of %d, about %.0f s left", self.what, self.done, self.total, left)


@contextmanager
def counting(what: str, total: int) -> Iterator[Counter]:
    """Yields a counter of `total` items, shown as `what`."""
    if not console.is_terminal or os.environ.get(STYLE) == "lines":
        yield Counter(what, total, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Counter(what, total, bar)


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yields the items and counts them."""
    with counting(what, total) as counter:
        for item in items:
            yield item
            counter.advance()


def say(message: str) -> None:
    """Shows one line to the user and logs it."""
    log.info(message)


def fail(message: str) -> None:
    """Shows the error with which a stage ends."""
    log.error(message)
    sys.stderr.flush()
