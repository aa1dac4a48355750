"""What the controller does when a gate has ended a run: it finishes it as the run of so many rounds that it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

STOPPED = "stopped.json"
"""Written by a gate that ends the run, in the run's folder: its round and symptoms."""


def stopped_after(run: Path) -> int | None:
    """The round after which a gate ended the run; None where none did."""
    try:
        return int(json.loads((run / STOPPED).read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, KeyError):
        return None


def forget(run: Path, rounds: int) -> None:
    """Removes the word of an earlier stop where the run is to go on."""
    if stopped_after(run) not in (None, rounds):
        (run / STOPPED).unlink(missing_ok=True)


def command(rounds: int, config_words: Sequence[str], arguments: Sequence[str] | None = None) -> list[str] | None:
    """The call of Snakemake that this process is, for `rounds` rounds; None where it was not called as a command.

    Args:
        config_words: what was given to `--config`, which holds once only.
        arguments: the words of the call; this process's where not given.
    """
    words = list(sys.argv if arguments is None else arguments)
    program = Path(words[0])
    if program.name != "snakemake" and program.parent.name != "snakemake":
        return None
    kept = [word for word in config_words if not word.startswith("rounds=")]
    options = ["--nolock", "--config", *kept, f"rounds={rounds}"]
    return [sys.executable, "-m", "snakemake", *words[1:], *options]
