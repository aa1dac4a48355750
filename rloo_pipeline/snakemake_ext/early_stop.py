"""Finishes a run that a gate has ended early, as a run of the rounds that it has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import configfiles

STOPPED = "stopped.json"
"""File in the run's folder, written by the gate that ends the run: the round and the symptoms."""


def stopped_after(run: Path) -> int | None:
    """The round after which a gate ended the run; None if none did."""
    try:
        return int(read_artifact(run / STOPPED)["round"])
    except (UserError, OSError):
        return None


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
