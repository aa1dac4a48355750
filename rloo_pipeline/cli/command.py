"""Defines commands of `rloo` as data (name, function, options), and builds the parser from them."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rloo_pipeline.config.loading import is_yaml_name
from rloo_pipeline.errors import did_you_mean
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG
from rloo_pipeline.version import __version__


class Option(NamedTuple):
    """An option, as arguments for argparse's `add_argument`."""

    flags: tuple[str, ...]
    keywords: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name under which argparse stores its value."""
        return str(self.keywords.get("dest") or self.flags[0].lstrip("-").replace("-", "_"))


class Command(NamedTuple):
    """A command of `rloo`."""

    name: str
    run: Callable[[argparse.Namespace], None]
    about: str
    """One sentence for `rloo --help` and `rloo NAME --help`."""
    options: tuple[Option, ...]
    passes_on: bool = False
    """True if the command accepts arbitrary arguments, as `arguments.unparsed`."""
    passes_rest: bool = False
    """True if the command accepts arbitrary arguments after `--`, as `arguments.unparsed`."""


def option(*flags: str, **keywords: Any) -> Option:
    """Makes an option or positional argument, with the arguments of argparse's `add_argument`."""
    return Option(flags, keywords)


def command(
    name: str, run: Callable[[argparse.Namespace], None] | str, about: str, *options: Option, passes_rest: bool = False
) -> Command:
    """Makes a command, which also takes `--log`.

    Args:
        name: command name.
        run: its function, or `module:function`, which gets the options as keyword arguments.
        about: one sentence for the help.
        options: options other than `--log`.
        passes_rest: see `Command`.
    """
    function = partial(call, run, options) if isinstance(run, str) else run
    return Command(name, function, about, (LOG, *options), passes_rest=passes_rest)


def call(reference: str, options: Sequence[Option], arguments: argparse.Namespace, *first: Any) -> None:
    """Imports a function, which may take seconds, and calls it with the options as keyword arguments.

    Args:
        reference: `module:function`.
        options: the options to pass.
        arguments: the parsed command line.
        first: positional arguments of the function.
    """
    module, _, name = reference.partition(":")
    values = {option.name: getattr(arguments, option.name) for option in options}
    getattr(import_module(module), name)(*first, **values)


def positive(number: str) -> float:
    """Parses an argument as a finite number above 0.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not 0 < (value := float(number)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return value


def count(number: str) -> int:
    """Parses an argument as a whole number of at least 1.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{number} is not a whole number above 0")
    return int(number)


LOG = option("--log", type=Path, help="file for the complete log, with tracebacks and engine output")
CONFIGURATION = (
    option("configuration", type=Path, metavar="CONFIG", nargs="?", default=DEFAULT_CONFIG, help="YAML file"),
    option(
        "--config", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="keys to change, as in Snakemake"
    ),
)
CONFIG = option("--configfile", dest="config", type=Path, help="configuration (default: config.yaml of the run)")
RUN = option("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Adds the default, unless there is none or the text names it."""
        if action.default in (None, False, []) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a single line, without the usage."""

    def print_help(self, file: Any = None) -> None:
        """Prints the help. Some releases of Python 3.11 hide that nobody reads it."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


class RlooParser(Parser):
    """The parser of `rloo`.

    Args:
        groups: heading in `rloo --help` → its commands.
    """

    def __init__(self, groups: Mapping[str, Sequence[Command]]) -> None:
        super().__init__(
            "rloo",
            usage="rloo [--version] COMMAND …",
            description="RLOO post-training. `rloo init` makes a project, `rloo run` starts or continues a run. The "
            "commands below prepare, watch and evaluate runs; Snakemake runs the stages.",
            epilog="`rloo COMMAND --help` lists the options of a command.",
        )
        self.groups = groups
        self.add_argument("--version", action="version", version=__version__)
        self.commands = self.add_subparsers(prog="rloo", metavar="COMMAND", required=True, parser_class=Parser)
        self.by_name = {command.name: command for commands in groups.values() for command in commands}
        for command in self.by_name.values():
            parser = self.commands.add_parser(
                command.name, help=command.about, description=command.about, formatter_class=_Help
            )
            parser.set_defaults(command=command.run, log=None)
            for option in command.options:
                parser.add_argument(*option.flags, **option.keywords)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parses the arguments. The error for an unknown command or option suggests the most similar one."""
        command = self.by_name.get(argv[0]) if argv else None
        if argv and command is None and not argv[0].startswith("-"):
            self.error(f"no command '{argv[0]}'{did_you_mean(argv[0], self.by_name)}")
        if command and command.passes_on and not {"-h", "--help"} & set(argv[1:2]):
            arguments = self.parse_args(argv[:1])
            arguments.unparsed = argv[1:]
            return arguments
        end = argv.index("--") if command and command.passes_rest and "--" in argv else len(argv)
        arguments, unknown = self.parse_known_args(argv[:end])
        arguments.unparsed = argv[end + 1 :]
        if hasattr(arguments, "configuration"):
            unknown = _without_changes(arguments, unknown)
        if unknown:
            parser = self.commands.choices[argv[0]]
            option = unknown[0].partition("=")[0]
            suggestion = did_you_mean(option, parser._option_string_actions) if option.startswith("-") else ""
            parser.error(f"unknown argument '{unknown[0]}'{suggestion}")
        return arguments

    def format_help(self) -> str:
        """Formats the usage, and the commands under their headings."""
        about = {action.dest: action for action in self.commands._get_subactions()}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [action for action in self._actions if action.option_strings], [])
        formatter.add_text(self.description)
        for heading, commands in self.groups.items():
            formatter.start_section(heading)
            formatter.add_arguments([about[command.name] for command in commands])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def _without_changes(arguments: argparse.Namespace, unknown: Sequence[str]) -> list[str]:
    """Accepts KEY=VALUE changes without `--config`, as `rloo run` does. Returns the other words."""
    words = [*unknown]
    if "=" in str(arguments.configuration) and not is_yaml_name(str(arguments.configuration)):
        words.insert(0, str(arguments.configuration))
        arguments.configuration = DEFAULT_CONFIG
    others = [word for word in words if word.startswith("-") or "=" not in word]
    arguments.config = [*arguments.config, *(word for word in words if word not in others)]
    return others
