"""watch: the files of one or several runs → a live view on the terminal. It only reads, so it can start at any time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_set import EXPERIMENT, RESULTS
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.report.live import frame_of_runs, watched
from rloo_pipeline.report.live_run import curves_of
from rloo_pipeline.report.run_progress import progress_of
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG

MOST = 26
"""Curves of a chart: each has a letter."""


def watch(runs: Sequence[Path], once: bool, every: float) -> None:
    """Shows the progress of a run, or the curves of several, until Ctrl-C or their end, and leaves the last view on the
    terminal. Waits for runs that have not begun.

    Args:
        runs: folders or names of runs and experiments; empty for the run of the project's configuration, else the
            newest in results/.
        once: print the view once and return.
        every: refresh interval in seconds.

    Raises:
        UserError: there is no run in a folder, none to choose, or too many.
    """
    console = Terminal()
    if len(runs) > MOST:
        raise UserError(f"{len(runs)} runs; {MOST} curves can be told apart")
    folders = [_folder(run) for run in runs] or [_folder(None)]
    several = len(folders) > 1 or (folders[0] / EXPERIMENT).exists()
    draw = partial(_frame_of_runs, folders, console) if several else partial(_frame, folders[0])
    with contextlib.suppress(KeyboardInterrupt):
        if not once and not all(map(_has_begun, folders)):
            waited_for = ", ".join(str(folder) for folder in folders if not _has_begun(folder))
            console.print(f"{waited_for} has not begun; waiting for it, Ctrl-C ends this")
        while not once and not all(map(_has_begun, folders)):
            time.sleep(every)
        shown, finished = draw()
        if not once and not finished:
            with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while not finished:
                    time.sleep(every)
                    with contextlib.suppress(UserError, OSError):  # a file was being replaced
                        shown, finished = draw()
                        live.update(shown, refresh=True)
        console.print(shown)
        return
    if all(map(_has_begun, folders)):
        console.print(draw()[0])


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


def _frame_of_runs(folders: Sequence[Path], console: Terminal) -> tuple[RenderableType, bool]:
    """The curves of several runs, and True if all are finished."""
    runs = curves_of(folders)
    if len(runs) > MOST:
        raise UserError(f"{len(runs)} arms; {MOST} curves can be told apart")
    return frame_of_runs(runs, console.width), all(run.is_finished for run in runs)


def _frame(run: Path) -> tuple[RenderableType, bool]:
    """The view, and True if the run is finished."""
    files = run_files.read(run)
    progress = progress_of(files)
    return watched(files, progress), progress.finished
