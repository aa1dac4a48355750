"""watch: the files of a run → a live view on the terminal. It only reads, so it can start and stop at any time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_set import RESULTS
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.report.live import frame
from rloo_pipeline.report.run_progress import progress_of
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG
from rloo_pipeline.snakemake_ext.early_stop import stopped_after


def watch(run: Path | None, once: bool, every: float) -> None:
    """Shows the progress of a run until Ctrl-C or its end, and leaves the last view on the terminal. Waits for a run
    that has not begun.

    Args:
        run: its folder or its name; None for the run of the project's configuration, else the newest in results/.
        once: print the view once and return.
        every: refresh interval in seconds.

    Raises:
        UserError: there is no run in the folder, or none to choose.
    """
    console = Terminal()
    run = _folder(run)
    with contextlib.suppress(KeyboardInterrupt):
        if not once and not _has_begun(run):
            console.print(f"{run} has not begun; waiting for it, Ctrl-C ends this")
        while not once and not _has_begun(run):
            time.sleep(every)
        shown, finished = _frame(run)
        if not once and not finished:
            with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while not finished:
                    time.sleep(every)
                    with contextlib.suppress(UserError, OSError):  # a file was being replaced
                        shown, finished = _frame(run)
                        live.update(shown, refresh=True)
        console.print(shown)
        return
    if _has_begun(run):
        console.print(_frame(run)[0])


def _folder(run: Path | None) -> Path:
    """The folder of the run that is meant."""
    if run is not None:
        return Path(RESULTS) / run if len(run.parts) == 1 and not run.is_dir() else run
    if DEFAULT_CONFIG.exists():
        configured = read_mapping(DEFAULT_CONFIG)
        if name := configured.get("run") or configured.get("experiment"):
            return Path(RESULTS) / str(name)
    begun = sorted(Path(RESULTS).glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
    if not begun:
        raise UserError(f"{RESULTS}: no run has begun in this folder; name its folder")
    return begun[-1].parent


def _has_begun(run: Path) -> bool:
    return any((run / name).exists() for name in ("config.yaml", "experiment.yaml"))


def _frame(run: Path) -> tuple[RenderableType, bool]:
    """The view, and True if the run is finished."""
    files = run_files.read(run)
    progress = progress_of(files)
    return frame(files, progress, stopped_after(run)), progress.finished
