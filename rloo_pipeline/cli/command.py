"""A command of `rloo` as data: its name, its function, its options. The tables of commands are made of these."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Option(NamedTuple):
    """Arguments for argparse's `add_argument`."""

    flags: tuple[str, ...]
    keywords: Mapping[str, Any]


class Command(NamedTuple):
    """One command."""

    name: str
    run: Callable[[argparse.Namespace], None]
    about: str
    """One sentence, for `rloo --help` and `rloo NAME --help`."""
    options: tuple[Option, ...]
    passes_on: bool = False
    """Whether it takes any arguments, as `arguments.unparsed`."""


def option(*flags: str, **keywords: Any) -> Option:
    """An option or positional argument, written as for argparse's `add_argument`."""
    return Option(flags, keywords)


def command(name: str, run: Callable[[argparse.Namespace], None], about: str, *options: Option) -> Command:
    """A command that also takes `--log`."""
    return Command(name, run, about, (LOG, *options))


LOG = option("--log", type=Path, help="file for the complete log, with tracebacks and the output of the engines")
CONFIG = option(
    "--config", type=Path, help="configuration; by default the config.yaml in the run folder that holds the output"
)
RUN = option("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")
