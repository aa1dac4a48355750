"""The argument parser of `rloo`: commands in groups, and errors as one sentence with a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from rloo_pipeline.cli.command import Command
from rloo_pipeline.errors import did_you_mean
from rloo_pipeline.version import __version__


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


class RlooParser(Parser):
    """The parser of `rloo`.

    Args:
        groups: the commands by the heading under which `rloo --help` lists them.
    """

    def __init__(self, groups: Mapping[str, Sequence[Command]]) -> None:
        super().__init__(
            "rloo",
            usage="rloo [--version] COMMAND …",
            description="RLOO post-training. `rloo init` makes a project, `rloo run` starts or continues a run. The "
            "commands below prepare, watch and evaluate runs; the stages are what Snakemake runs.",
            epilog="`rloo COMMAND --help` lists the options of a command.",
        )
        self.groups = groups
        self.add_argument("--version", action="version", version=__version__)
        self.commands = self.add_subparsers(prog="rloo", metavar="COMMAND", required=True, parser_class=Parser)
        for command in (command for commands in groups.values() for command in commands):
            parser = self.commands.add_parser(
                command.name,
                help=command.about,
                description=command.about,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
            parser.set_defaults(command=command.run, log=None)
            for option in command.options:
                parser.add_argument(*option.flags, **option.keywords)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parses the arguments; the error for an unknown command or option names the most similar one."""
        names = self.commands.choices
        passes_on = {command.name for commands in self.groups.values() for command in commands if command.passes_on}
        if argv and not argv[0].startswith("-") and argv[0] not in names:
            self.error(f"no command '{argv[0]}'{did_you_mean(argv[0], names)}")
        if argv and argv[0] in passes_on and not {"-h", "--help"} & set(argv[1:2]):
            arguments = self.parse_args(argv[:1])
            arguments.unparsed = argv[1:]
            return arguments
        rest = {command.name for commands in self.groups.values() for command in commands if command.passes_rest}
        end = argv.index("--") if argv and argv[0] in rest and "--" in argv else len(argv)
        arguments, unknown = self.parse_known_args(argv[:end])
        arguments.unparsed = argv[end + 1 :]
        if unknown:
            parser = names[argv[0]]
            option = unknown[0].partition("=")[0]
            suggestion = did_you_mean(option, parser._option_string_actions) if option.startswith("-") else ""
            parser.error(f"it does not accept '{unknown[0]}'{suggestion}")
        return arguments

    def format_help(self) -> str:
        """Usage and the commands under their headings."""
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
