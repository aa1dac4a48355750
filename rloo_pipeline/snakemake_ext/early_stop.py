"""Runs with fewer rounds than planned, or than their files have. If a gate has ended a run early, it is finished as a
run of the rounds that it has. A finished run may also be called again with fewer rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.judging.diagnosis import STOPPED
from rloo_pipeline.judging.run_files import stopped_after
from rloo_pipeline.snakemake_ext import configfiles, failures, run_folders


def sampled_ahead(run: Path, round_: int) -> int:
    """Number of rounds after `round_` that were sampled ahead (rollout.lag); a run that ends there never uses them."""
    return sum(
        1 for folder in run.glob("rounds/*/rollouts") if int(folder.parent.name) > round_ and any(folder.iterdir())
    )


def forget(run: Path, rounds: int) -> None:
    """Removes the file of an earlier stop if the run now has another number of rounds."""
    if stopped_after(run) not in (None, rounds):
        (run / STOPPED).unlink(missing_ok=True)


def shortened(runs: RunSet, results: Path) -> RunSet:
    """The runs of an experiment, those that a gate has ended with the rounds that they have.

    Args:
        runs: as configured.
        results: the folder that theirs are in.
    """
    if not runs.experiment:
        return runs
    ends = {run: stopped_after(results / run) or config.rounds for run, config in runs.configs.items()}
    configs = {
        run: config.model_copy(update={"rounds": min(ends[run], config.rounds)}) for run, config in runs.configs.items()
    }
    return replace(runs, configs=configs)


def overwritten(run: Path, rounds: int) -> str | None:
    """An error message if a call with this number of rounds would overwrite the evaluation of a longer run.

    None if that evaluation has been removed, or if a gate has ended the run at this round.
    """
    try:
        finished = int(json.loads((run / "summary.json").read_text(encoding="utf-8"))["rounds"])
    except (OSError, ValueError, KeyError):
        return None
    final = run / "evaluation" / "final"
    if finished <= rounds or not final.exists() or stopped_after(run) == rounds:
        return None
    return (
        f"{run} has finished {finished} rounds; with `rounds: {rounds}`, evaluation and report of round {finished} "
        f"would be overwritten: set rounds to {finished} or more, or another `run` name; if you want those of round "
        f"{rounds} instead, remove {final}"
    )


def finish(
    runs: RunSet, results: Path, ended: Mapping[str, int], configfile: Path | None, leave_terminal: Callable[[], None]
) -> None:
    """Finishes runs that gates have ended, by a second call of Snakemake (judging/diagnosis.py says why). This process
    keeps the lock of the run.

    Args:
        runs: all runs of this process.
        results: folder that contains the folders of runs.
        ended: round after which a gate ended the run, by run.
        configfile: as for `command`.
        leave_terminal: gives the terminal to the second call.

    Raises:
        SystemExit: with 0 on success.
    """
    from snakemake.logging import logger

    # of an experiment, `shortened` ends the runs
    change = f"experiment={runs.name}" if runs.experiment else f"rounds={next(iter(ended.values()))}"
    again = command(change, configfile)
    if again is None:
        return
    for run, stopped in ended.items():
        run_label = f" of {run}" if runs.experiment else ""
        logger.info(f"A gate ended the run{run_label} after round {stopped}: now its evaluation and report.")
        run_folders.write_config(results / run, runs.configs[run], rounds=stopped)
    leave_terminal()
    if subprocess.run(again, env=os.environ | {failures.COMMAND: failures.typed()}, check=False).returncode:
        return
    for run, stopped in ended.items():
        folder, planned = results / run, runs.configs[run].rounds
        logger.info(f"{folder} ended after round {stopped} of {planned}; {folder / STOPPED} says why.")
        if ahead := sampled_ahead(folder, stopped):
            logger.info(f"Rollouts of {ahead} later round(s), sampled ahead by rollout.lag, stay unused.")
    raise SystemExit(0)


def command(change: str, configfile: Path | None, argv: Sequence[str] | None = None) -> list[str] | None:
    """The command line of this Snakemake process, for another configuration; None if Snakemake was called from Python.

    Args:
        change: for `--config`, which counts only once, so it also takes the place of what was given there.
        configfile: the configuration that this process works on, with what was given to `--config`; None if no file
            has it.
        argv: the command line; this process's by default.
    """
    command_line = list(sys.argv if argv is None else argv)
    if not configfiles.is_snakemake(command_line[0]):
        return None
    config = ["--configfile", str(configfile), "--config", change] if configfile else []
    return [sys.executable, "-m", "snakemake", *command_line[1:], "--nolock", *config]
