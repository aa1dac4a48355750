"""A finished run that is called with fewer rounds: its evaluation and report would be those of an earlier round."""

from __future__ import annotations

import json
from pathlib import Path

from rloo_pipeline.snakemake_ext import early_stop


def overwritten(run: Path, rounds: int) -> str | None:
    """A sentence if a call with this number of rounds would overwrite the evaluation of a longer run.

    None where that evaluation has been removed, or where a gate has ended the run at this round.
    """
    try:
        finished = int(json.loads((run / "summary.json").read_text(encoding="utf-8"))["rounds"])
    except (OSError, ValueError, KeyError):
        return None
    final = run / "evaluation" / "final"
    if finished <= rounds or not final.exists() or early_stop.stopped_after(run) == rounds:
        return None
    return (
        f"{run} has finished {finished} rounds, and with `rounds: {rounds}` evaluation and report of round {finished} "
        f"would be overwritten: set rounds to {finished} or more, or another `run` name; if you do want those of round "
        f"{rounds} instead, remove {final}"
    )
