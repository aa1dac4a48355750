"""Handles how a call ends: on a failure, an interrupt, or with fewer rounds than planned or already done.

If a gate has ended a run early, the run is finished with the rounds that it has. A finished run may also be called
again with fewer rounds.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from snakemake.logging import logger

from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.judging.diagnosis import STOPPED
from rloo_pipeline.judging.run_files import is_finished, metrics_of, stopped_after
from rloo_pipeline.runtime import controller_watch
from rloo_pipeline.snakemake_ext import configfiles, failures, run_folders
from rloo_pipeline.snakemake_ext.logger import displays
from rloo_pipeline.snakemake_ext.replacing import replaces
from rloo_pipeline.snakemake_ext.snakemake_call import FINISHES, SnakemakeCall


def sampled_ahead(run: Path, round_: int) -> int:
    """Number of rounds after `round_` that were sampled ahead (rollout.lag). A run that ends at `round_` never uses
    them.
    """
    return sum(
        1 for folder in run.glob("rounds/*/rollouts") if int(folder.parent.name) > round_ and any(folder.iterdir())
    )


def forget_earlier(call: SnakemakeCall) -> None:
    """Removes the record of an earlier stop if the run now has a different number of rounds."""
    for run, config in call.runs.configs.items():
        if stopped_after(call.run_folder(run)) not in (None, config.rounds):
            (call.run_folder(run) / STOPPED).unlink(missing_ok=True)


def refuse_earlier(call: SnakemakeCall) -> None:
    """Refuses to train a run again only up to the round after which a gate ended its earlier training.

    Raises:
        UserError: the round of a stopped.json would be trained again; the message names all such files.
    """
    outputs = call.outputs()
    ends = {call.run_folder(run): call.runs.configs[run].rounds for run in sorted(call.stopped)}
    again = {folder: last for folder, last in ends.items() if str(metrics_of(folder, last)) in outputs}
    if again:
        ended = ", ".join(f"{folder} after round {last}" for folder, last in again.items())
        raise UserError(
            f"a gate ended {ended}, but {'that round' if len(again) == 1 else 'those rounds'} would be trained again, "
            f"which may go differently: delete {' '.join(str(folder / STOPPED) for folder in again)}, and the gates "
            "judge the training anew"
        )


def longer_runs(call: SnakemakeCall) -> Iterator[str]:
    """Yields a sentence for each run whose evaluation would be overwritten by one after fewer rounds."""
    for run in call.to_finish():
        if longer := overwritten(call.run_folder(run), call.runs.configs[run].rounds):
            yield longer


def refuse_fewer_rounds(call: SnakemakeCall) -> None:
    """Refuses a call that would overwrite the evaluation of a longer run."""
    for longer in longer_runs(call):
        raise UserError(longer)


def overwritten(run: Path, rounds: int) -> str | None:
    """The error message if a call with this number of rounds would overwrite the evaluation of a longer run.

    It is None if that evaluation has been removed, or if a gate has ended the run at this round.
    """
    try:
        finished = int(json.loads((run / "summary.json").read_text(encoding="utf-8"))["rounds"])
    except (OSError, ValueError, KeyError):
        return None
    final = run / "evaluation" / "final"
    if finished <= rounds or not final.exists() or stopped_after(run) == rounds:
        return None
    return (
        f"{run} has finished {counted(finished, 'round')}; with `rounds: {rounds}`, evaluation and report of round "
        f"{finished} would be overwritten: set rounds to {finished} or more, or another `run` name; if you want those "
        f"of round {rounds} instead, remove {final}"
    )


def prepare_end(call: SnakemakeCall) -> None:
    """Makes an experiment continue with its other runs if one fails, as with --keep-going, and makes Snakemake end its
    jobs when the user interrupts it.
    """
    if call.runs.experiment:
        call.workflow.scheduler.keepgoing = True
    only_first_interrupt()


def prepare_interrupt(call: SnakemakeCall) -> None:
    """Makes Ctrl-C end Snakemake with a message instead of a traceback while it is planning."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"Interrupted; {failures.go_on()}", file=sys.stderr)
        else:
            shown(kind, error, trace)

    if call.main:
        sys.excepthook = show


def end_with_first(call: SnakemakeCall) -> None:
    """Makes a call that finishes a run end with the call that started it, so that it does not work beside the next."""
    if call.main:
        controller_watch.watch(FINISHES)


def end_gracefully(call: SnakemakeCall) -> None:
    """Makes SIGTERM end Snakemake, as when SLURM ends a job, even while it waits for a job's files: its handler waits
    for a lock that the interrupted thread then holds. Displays know of the signal at once, so jobs that it ends do not
    count as failures while Snakemake is busy.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    @replaces(JobScheduler, "exit_gracefully")
    def handler(end: Any, scheduler: Any, *_: Any) -> None:
        for display in displays(call):
            display.stopping = True
        threading.Thread(target=end, args=(scheduler,)).start()


def only_first_interrupt() -> None:
    """Makes only the first SIGINT raise KeyboardInterrupt, since a second one, while Snakemake ends its jobs, would
    break its event loop with a traceback. Leaves handlers that others have installed alone.

    Having our own handler also keeps asyncio from installing one that cancels a task instead.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: int | FrameType | None) -> None:
    # not SIG_IGN, which child processes would inherit
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def show_experiment(call: SnakemakeCall) -> None:
    """Writes the page of an experiment from its finished runs, even if others have failed; but no table for a paper, so
    that the next call makes all of it again: Snakemake has no record of which runs it shows.
    """
    finished = (is_finished(call.run_folder(run), config) for run, config in call.runs.configs.items())
    if call.runs.experiment and any(finished):
        subprocess.run([sys.executable, "-m", "rloo_pipeline", "experiment", str(call.folder)], check=False)
        (call.folder / "experiment.tex").unlink(missing_ok=True)


def finish(call: SnakemakeCall) -> None:
    """Finishes runs that gates have ended, with a second Snakemake call (judging/diagnosis.py says why). This process
    keeps the run's lock.

    Raises:
        SystemExit: with status 0 on success.
    """
    configs = call.runs.configs
    stops = {run: stopped_after(call.run_folder(run)) or config.rounds for run, config in configs.items()}
    ended = {run: stop for run, stop in stops.items() if stop < configs[run].rounds}
    if not ended or not call.alone or call.workflow.dag_settings.targets:
        return
    again = command(call.config_copy)
    if again is None:
        return
    for run, stopped in ended.items():
        run_label = f" of {run}" if call.runs.experiment else ""
        logger.info(f"A gate ended the run{run_label} after round {stopped}: now its evaluation and report.")
        run_folders.write_config(call.run_folder(run), configs[run], rounds=stopped)
    for display in displays(call):
        display.give_terminal_back()
    environment = os.environ | {FINISHES: controller_watch.name(), failures.COMMAND: failures.typed_command()}
    if subprocess.run(again, env=environment, check=False).returncode:
        return
    for run, stopped in ended.items():
        folder, planned = call.run_folder(run), configs[run].rounds
        logger.info(f"{folder} ended after round {stopped} of {planned}; {folder / STOPPED} says why.")
        if ahead := sampled_ahead(folder, stopped):
            logger.info(f"Rollouts of {ahead} later round(s), sampled ahead by rollout.lag, stay unused.")
    raise SystemExit(0)


def command(configfile: Path | None, argv: Sequence[str] | None = None) -> list[str] | None:
    """The command line of this Snakemake process with its copied configuration; None if Snakemake was called from
    Python.

    Args:
        configfile: file with the configuration of this process, including `--config`; None if there is no such file.
        argv: the command line; None for that of this process.
    """
    command_line = list(sys.argv if argv is None else argv)
    if not configfiles.is_snakemake(command_line[0]):
        return None
    config = ["--configfile", str(configfile), "--config", "functions=keep"] if configfile else []
    options = configfiles.without(command_line[1:]) if configfile else command_line[1:]
    return [sys.executable, "-m", "snakemake", *options, "--nolock", *config]
