"""watch: the files of a run → a live view on the terminal. It reads only, so it may be opened and left at any time."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.live import frame
from rloo_pipeline.snakemake_ext.early_stop import stopped_after


def watch(run: Path, once: bool, every: float, console: Console | None = None) -> None:
    """Shows the run until Ctrl-C, anew after so many seconds; or once.

    Raises:
        UserError: there is no run in the folder.
    """
    console = console or Console()
    shown = _frame(run)
    if once:
        console.print(shown)
        return
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                time.sleep(every)
                try:
                    live.update(_frame(run), refresh=True)
                except (UserError, OSError):
                    continue  # read between the removal of a file and its new version
    except KeyboardInterrupt:
        return


def _frame(run: Path) -> RenderableType:
    return frame(run_files.read(run), stopped_after(run))
