"""What `rloo` says of itself: a person's commands before those that Snakemake calls; wrong words in one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rloo_pipeline.errors import did_you_mean

PEOPLE = {
    "before a run": ("check", "plan", "doctor", "reward-test", "profiles"),
    "while it runs": ("watch", "diagnose", "submit", "status", "cancel"),
    "afterwards": ("compare", "rescore", "track"),
}
"""Commands for people, under their headings and in the order in which they are listed."""
STAGES = "stages, which Snakemake calls: each job's line can be pasted into a shell"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the words, and ends with 2."""
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


class Commands(Parser):
    """The parser of `rloo` itself."""

    commands: argparse._SubParsersAction[Parser] | None = None

    def take(self, words: list[str]) -> argparse.Namespace:
        """The words, parsed; where a command or an option is unknown, the one that was meant is named."""
        assert self.commands
        known = self.commands.choices
        if words and not words[0].startswith("-") and words[0] not in known:
            self.error(f"no command '{words[0]}'{did_you_mean(words[0], known)}")
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            command = known[words[0]]
            option = unknown[0].partition("=")[0]
            near = did_you_mean(option, command._option_string_actions) if option.startswith("-") else ""
            command.error(f"it takes no '{unknown[0]}'{near}")
        return arguments

    def format_help(self) -> str:
        """Usage, options, and the commands under their headings."""
        assert self.commands
        about = {action.dest: action for action in self.commands._get_subactions()}
        named = [name for names in PEOPLE.values() for name in names]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [action for action in self._actions if action.option_strings], [])
        formatter.add_text(self.description)
        stages = tuple(name for name in about if name not in named)
        for heading, names in {**PEOPLE, STAGES: stages}.items():
            formatter.start_section(heading)
            formatter.add_arguments([about[name] for name in names])
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()
