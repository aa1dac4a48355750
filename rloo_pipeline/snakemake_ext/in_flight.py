"""Decides for which rounds Snakemake makes the files that measure and show a run in flight.

A finished round has no reason to run again for them: what a finished run lacks, since it was made without them, is not
made afterwards. What a killed run lacks is.
"""

from __future__ import annotations

from pathlib import Path

from rloo_pipeline.config import Config
from rloo_pipeline.judging.run_files import held_out_of, is_finished, metrics_of


def held_out_rounds(config: Config, run: Path, in_job: bool = False) -> list[int]:
    """Rounds with held-out accuracy: all that measure it if the run is not finished, else those where it is there.

    Args:
        config: the run's configuration.
        run: its folder.
        in_job: True in a job on another machine, whose planned inputs all exist already.
            The summary says no more whether the run was finished when that was planned.
    """
    rounds = range(1, config.rounds + 1)
    if config.held_out_each_round and not in_job and not is_finished(run, config):
        return list(rounds)
    return [number for number in rounds if held_out_of(run, number).exists()]


def page_rounds(config: Config, run: Path) -> list[int]:
    """Rounds after which a page is written; the last page is that of the finished run."""
    return [
        number
        for number in range(1, config.rounds)
        if page_of(run, number).exists() or (config.page_is_due(number) and not metrics_of(run, number).exists())
    ]


def page_of(run: Path, number: int) -> Path:
    """The record that a page was written after a round."""
    return run / "pages" / f"{number:05d}.json"
