"""Ctrl-C ends a run once: a second one, while Snakemake ends its jobs, would break its event loop with a traceback."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def only_first() -> None:
    """Lets only the first SIGINT of this process raise KeyboardInterrupt. Leaves a handler of someone else alone.

    A handler of our own also keeps asyncio from installing one that cancels a task instead.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _first)


def _first(*_: int | FrameType | None) -> None:
    # a function rather than SIG_IGN, which child processes would inherit
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt
