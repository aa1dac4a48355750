"""watch: the files of a run → a live view on the terminal. It only reads, so it can start and stop at any time."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.live import frame
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.snakemake_ext.early_stop import stopped_after


def watch(run: Path, once: bool, every: float, console: Terminal | None = None) -> None:
    """Shows the progress of a run until Ctrl-C.

    Args:
        run: its folder.
        once: print the view once and return.
        every: refresh interval in seconds.
        console: where to print; by default standard output.

    Raises:
        UserError: there is no run in the folder.
    """
    console = console or Terminal()
    first = _frame(run)
    if once:
        console.print(first)
        return
    try:
        with Live(first, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(every)
                try:
                    live.update(_frame(run), refresh=True)
                except (UserError, OSError):
                    continue  # a file was being replaced
    except KeyboardInterrupt:
        return


def _frame(run: Path) -> RenderableType:
    return frame(run_files.read(run), stopped_after(run))
