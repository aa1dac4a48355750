"""A command of `rloo` as data: its name, its function, its options. The tables of commands are made of these."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.runtime.installation import DEFAULT_CONFIG


class Option(NamedTuple):
    """Arguments for argparse's `add_argument`."""

    flags: tuple[str, ...]
    keywords: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name that argparse gives to its value."""
        return str(self.keywords.get("dest") or self.flags[0].lstrip("-").replace("-", "_"))


class Command(NamedTuple):
    """One command."""

    name: str
    run: Callable[[argparse.Namespace], None]
    about: str
    """One sentence, for `rloo --help` and `rloo NAME --help`."""
    options: tuple[Option, ...]
    passes_on: bool = False
    """True if it takes any arguments, as `arguments.unparsed`."""
    passes_rest: bool = False
    """True if the command takes any arguments after `--`, as `arguments.unparsed`."""


def option(*flags: str, **keywords: Any) -> Option:
    """An option or positional argument, written as for argparse's `add_argument`."""
    return Option(flags, keywords)


def command(
    name: str,
    run: Callable[[argparse.Namespace], None] | str,
    about: str,
    *options: Option,
    passes_rest: bool = False,
) -> Command:
    """A command that also takes `--log`.

    Args:
        name: command name.
        run: its function; or `module:function`, which gets the options as keyword arguments.
        about: one sentence for the help.
        options: besides `--log`.
        passes_rest: as in `Command`.
    """
    function = partial(call, run, options) if isinstance(run, str) else run
    return Command(name, function, about, (LOG, *options), passes_rest=passes_rest)


def call(reference: str, options: Sequence[Option], arguments: argparse.Namespace, *first: Any) -> None:
    """Imports a function, which may take seconds, and calls it with the values of options by their names.

    Args:
        reference: `module:function`.
        options: options that it takes.
        arguments: the parsed command line.
        first: arguments before the options.
    """
    module, _, name = reference.partition(":")
    values = {option.name: getattr(arguments, option.name) for option in options}
    getattr(import_module(module), name)(*first, **values)


def positive(number: str) -> float:
    """A number of argparse that has to be finite and above 0.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not 0 < (value := float(number)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return value


def count(number: str) -> int:
    """A whole number of argparse that is at least 1.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{number} is not a whole number above 0")
    return int(number)


LOG = option("--log", type=Path, help="file for the complete log, with tracebacks and the output of the engines")
CONFIGURATION = (
    option("configuration", type=Path, metavar="CONFIG", nargs="?", default=DEFAULT_CONFIG, help="YAML file"),
    option("--config", nargs="+", default=[], metavar="KEY=VALUE", help="keys to change, as for Snakemake"),
)
CONFIG = option(
    "--configfile",
    dest="config",
    type=Path,
    help="configuration; by default the config.yaml in the run folder that holds the output",
)
RUN = option("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")
