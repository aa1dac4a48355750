"""watch, diagnose: show a live view of runs, or a table of symptoms, on the terminal. They only read files."""

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_set import EXPERIMENT, RESULTS
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.diagnosis import Symptom
from rloo_pipeline.report.live import COLOURS, frame_of_runs, watched
from rloo_pipeline.report.live_run import curves_of
from rloo_pipeline.report.run_progress import progress_of
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG

MOST = 26
"""Maximum number of curves in a chart, since each has a letter."""


def watch(runs: Sequence[Path], once: bool, every: float) -> None:
    """Shows the progress of a run, or the curves of several, until they end or Ctrl-C, and leaves the last view on the
    terminal. Waits for runs that have not begun.

    Args:
        runs: folders or names of runs and experiments; empty for the run of the project's configuration or, failing
            that, the newest in results/.
        once: print the view once and return.
        every: refresh interval in seconds.

    Raises:
        UserError: a folder has no run, there is no run to choose, or there are too many.
    """
    console = Terminal()
    if len(runs) > MOST:
        raise UserError(f"{len(runs)} runs; {MOST} curves can be told apart")
    folders = [_folder(run) for run in runs] or [_folder(None)]
    several = len(folders) > 1 or (folders[0] / EXPERIMENT).exists()
    draw = partial(_frame_of_runs, folders, console) if several else partial(_frame, folders[0])
    with contextlib.suppress(KeyboardInterrupt):
        if not once and (waited_for := [str(folder) for folder in folders if not _has_begun(folder)]):
            console.print(f"{', '.join(waited_for)} has not begun; waiting for it, Ctrl-C ends this")
            while not all(map(_has_begun, folders)):
                time.sleep(every)
        if not runs and not _has_begun(folders[0]):
            raise UserError(f"{folders[0]} has not begun; `rloo run` starts it")
        shown, finished = draw()
        if not once and not finished:
            if not console.is_interactive:  # it cannot be redrawn, so there the view comes now and at the end
                console.print(shown)
            with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while not finished:
                    time.sleep(every)
                    with contextlib.suppress(UserError, OSError):  # a file was just being replaced
                        shown, finished = draw()
                        live.update(shown, refresh=True)
        console.print(shown)
        return
    if all(map(_has_begun, folders)):
        console.print(draw()[0])


def _folder(run: Path | None) -> Path:
    """The folder of the named run, or of the default one."""
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
    return any((run / name).exists() for name in ("config.yaml", EXPERIMENT))


def _goes_on(run: Path) -> bool:
    """True if a process may work on a run, or its job in SLURM's queue will."""
    from rloo_pipeline.cluster import submission
    from rloo_pipeline.snakemake_ext import locks

    return locks.may_be_alive(run) or submission.may_be_queued(run)


def _frame_of_runs(folders: Sequence[Path], console: Terminal) -> tuple[RenderableType, bool]:
    """A view with the curves of several runs, and True if all are finished, or nothing works on them any more."""
    goes_on = any(map(_goes_on, folders))  # first, so that the last view has all that was written
    runs = curves_of(folders)
    if len(runs) > MOST:
        raise UserError(f"{len(runs)} arms; {MOST} curves can be told apart")
    return frame_of_runs(runs, console.width), all(run.is_finished for run in runs) or not goes_on


def _frame(run: Path) -> tuple[RenderableType, bool]:
    """The view of a run, and True if it is finished, or nothing works on it any more."""
    goes_on = _goes_on(run)  # first, so that the last view has all that was written
    files = run_files.read(run)
    progress = progress_of(files)
    ended = progress.finished or not goes_on
    return watched(files, progress, ended=ended), ended


def diagnose(run: Path) -> None:
    """Prints the symptoms of a run, finished or running.

    Args:
        run: the run's folder.

    Raises:
        UserError: the folder has no run, or one of its files is damaged.
    """
    files = run_files.read(run)
    symptoms = files.symptoms()
    console = Terminal()
    done = len(files.rounds)
    state = f"{run}: {done} of {counted(files.config.rounds, 'round')}"
    if files.ended_by_gate:
        state += f", ended by a gate after round {done}"
    console.print(state)
    if not symptoms:
        console.print("no symptoms" if done else _why_no_round(run))
        return
    console.print(_table(symptoms, done))


def _why_no_round(run: Path) -> str:
    """Explains why no round is done, with failed checks of policy 0 and their advice."""
    file = run / "warmstart" / "checks.failed.json"
    if not file.exists():
        return run_files.why_no_round(run)
    failed = [check for check in read_artifact(file)["checks"] if check["verdict"] == "fail" and not check["accepted"]]
    lines = [f"{check['name']}: {check['shown']}; {check['advice']}" for check in failed]
    return "\n".join(["policy 0 did not pass its checks, so the first update has not begun:", *lines])


def _table(symptoms: list[Symptom], done: int) -> Table:
    """The symptoms as a table. Those of the latest round are coloured by their action."""
    table = Table("rounds", "symptom", "evidence", "what to try")
    for symptom in symptoms:
        rounds = f"{symptom.first}–{symptom.last}" if symptom.last > symptom.first else f"{symptom.first}"
        style = COLOURS[symptom.action] if symptom.last == done else "dim"
        table.add_row(rounds, Text(symptom.title, style), Text(symptom.evidence), Text(symptom.cure))
    return table
