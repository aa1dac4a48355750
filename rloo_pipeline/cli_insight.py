"""The commands that look at a run, before, while and after it runs: gate, diagnose, plan, doctor, watch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.config_file import load

AddCommand = Callable[..., argparse.ArgumentParser]
WITHOUT_CONFIG = ("diagnose", "watch")
"""Those that find the configuration by the run that they are given."""


def add_commands(add: AddCommand) -> None:
    """Adds them to the parser; `add` makes a command of a name, a function and a sentence."""
    gate = add("gate", _gate, "Look at a round before the next one begins; may end the run.", "output")
    gate.add_argument("--round", type=int, required=True, help="number of the round, from 1")
    diagnose = add("diagnose", _diagnose, "Say what is wrong with a run, finished or in flight.")
    diagnose.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")


def _gate(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.gate import gate

    run = arguments.output.absolute().parents[2]
    gate(load(arguments.config or run / "config.yaml").only("gate"), run, arguments.round, arguments.output)


def _diagnose(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.diagnose import diagnose

    diagnose(arguments.run)
