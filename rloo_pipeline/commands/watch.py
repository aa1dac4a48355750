"""watch: the files of a run → a live view on the terminal. It only reads, so it can start and stop at any time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.live import frame
from rloo_pipeline.report.run_progress import progress_of
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.snakemake_ext.early_stop import stopped_after


def watch(run: Path, once: bool, every: float) -> None:
    """Shows the progress of a run until Ctrl-C or its end, and leaves the last view on the terminal.

    Args:
        run: its folder.
        once: print the view once and return.
        every: refresh interval in seconds.

    Raises:
        UserError: the folder has no run.
    """
    console = Terminal()
    shown, finished = _frame(run)
    with contextlib.suppress(KeyboardInterrupt):
        if not once and not finished:
            with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while not finished:
                    time.sleep(every)
                    with contextlib.suppress(UserError, OSError):  # a file was being replaced
                        shown, finished = _frame(run)
                        live.update(shown, refresh=True)
    console.print(shown)


def _frame(run: Path) -> tuple[RenderableType, bool]:
    """The view, and True if the run is finished."""
    files = run_files.read(run)
    progress = progress_of(files)
    return frame(files, progress, stopped_after(run)), progress.finished
