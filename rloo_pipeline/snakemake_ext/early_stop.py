"""When a gate has ended a run early, the controller finishes it as a run of the rounds that it has."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

STOPPED = "stopped.json"
"""File in the run's folder, written by the gate that ends the run: the round and the symptoms."""


def stopped_after(run: Path) -> int | None:
    """The round after which a gate ended the run; None if none did."""
    try:
        return int(json.loads((run / STOPPED).read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, KeyError):
        return None


def forget(run: Path, rounds: int) -> None:
    """Removes the file of an earlier stop if the run now has another number of rounds."""
    if stopped_after(run) not in (None, rounds):
        (run / STOPPED).unlink(missing_ok=True)


def command(rounds: int, config_args: Sequence[str], argv: Sequence[str] | None = None) -> list[str] | None:
    """The command line of this Snakemake process, with `rounds` rounds; None if Snakemake was called from Python.

    Args:
        config_args: what was given to `--config`; the option counts only once, so it is given again in full.
        argv: the command line; this process's by default.
    """
    command_line = list(sys.argv if argv is None else argv)
    program = Path(command_line[0])
    if program.name != "snakemake" and program.parent.name != "snakemake":
        return None
    unchanged = [pair for pair in config_args if not pair.startswith("rounds=")]
    options = ["--nolock", "--config", *unchanged, f"rounds={rounds}"]
    return [sys.executable, "-m", "snakemake", *command_line[1:], *options]
