"""Progress of a stage: a bar on a terminal, plain lines otherwise."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")
log = logging.getLogger("rloo")
console = Console(stderr=True)
SECONDS_BETWEEN_LINES = 15.0
SECONDS_OF_SILENCE = 10.0
STYLE = "RLOO_PROGRESS"
"""Environment variable; with the value `lines`, progress is shown as lines on a terminal too."""
TERMINAL = "RLOO_TERMINAL"
"""Environment variable: path of the terminal on which rank 0 shows its progress."""
RUN = "RLOO_RUN_OF_EXPERIMENT"
"""Environment variable: run of an experiment that rank 0 names on that terminal, such as `sums/plain/0`."""
run = ""
"""Run of an experiment that this process works on; empty for a single run."""


class Counter:
    """Counts finished items of a known total and shows progress."""

    def __init__(self, label: str, total: int, bar: Progress | None) -> None:
        self.label, self.total, self.done, self.bar = label, total, 0, bar
        self.task = bar.add_task(label, total=total) if bar else None
        self.first = (0.0, 0)  # the time at which the first items were done, and their number
        self.printed = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Adds `count` finished items. The estimate leaves out the first ones, which may wait for an engine."""
        now = time.monotonic()
        if not self.done:
            self.first = (now, count)
        self.done += count
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.done)
        elif now - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = now
            began, first = self.first
            per_item = (now - began) / (self.done - first) if self.done > first else None
            left = "" if per_item is None else f", about {(self.total - self.done) * per_item:.0f} s left"
            log.info("%s: %d of %d%s", self.label, self.done, self.total, left)


@contextmanager
def counting(label: str, total: int) -> Iterator[Counter]:
    """Yields a counter of `total` items, shown as `label`."""
    if not console.is_terminal or os.environ.get(STYLE) == "lines":
        yield Counter(label, total, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Counter(label, total, bar)


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yields the items and counts them."""
    with counting(label, total) as counter:
        for item in items:
            yield item
            counter.advance()


@contextmanager
def announcing(doing: str, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Says what a long block is doing: after 10 s, and then at intervals that double.

    Args:
        doing: the work, such as `starting vLLM`.
        tell: shows a line, by default as `say` does.
    """
    ended, began = threading.Event(), time.monotonic()

    def speak() -> None:
        wait = SECONDS_OF_SILENCE
        while not ended.wait(wait):
            (tell or say)(f"{doing}: {time.monotonic() - began:.0f} s so far")
            wait *= 2

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def say(message: str) -> None:
    """Shows one line to the user and logs it."""
    log.info(message)


def warn(message: str, error: BaseException) -> None:
    """Shows one line about an error that does not end the stage; its traceback goes to the log."""
    logging.getLogger("traceback").warning("traceback of the error below:", exc_info=error)
    say(f"warn: {message}")


def fail(message: str) -> None:
    """Shows the error with which a stage ends."""
    log.error(message)
    sys.stderr.flush()
