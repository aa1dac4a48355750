"""Checks before a run: their findings, how these are shown, and the inputs of the run that later checks use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.data.rows import Row
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from rloo_pipeline.rollout.episode_loop import EpisodeRecord
    from rloo_pipeline.rollout.templating import Templater
    from rloo_pipeline.rollout.tool_calls import CallReader
    from rloo_pipeline.runtime.console import Terminal
    from rloo_pipeline.user_code.pool import EnvironmentPool


class Finding(NamedTuple):
    """The result of one check."""

    subject: str
    ok: bool
    message: str
    fix: str = ""
    """Advice on a problem, if the message does not give it."""
    note: bool = False
    """True if an ok finding needs attention: it may fail later, or could not be checked."""

    @property
    def sentence(self) -> str:
        """A problem as an error message."""
        return f"{self.subject}: {self.message}; {self.fix}"


@contextmanager
def problems_of(subject: str, fix: str = "") -> Iterator[list[Finding]]:
    """Context manager for checks: the list gets a finding if a UserError ends the block, and a note if a library that
    the block needs is not installed here.
    """
    findings: list[Finding] = []
    try:
        yield findings
    except UserError as error:
        findings.append(Finding(subject, False, str(error), fix))
    except ImportError as error:
        message = f"not checked, because the environment of the stages is not installed here ({error})"
        findings.append(Finding(subject, True, message, note=True))


def show(findings: Iterable[Finding], console: Terminal) -> int:
    """Prints findings as they arrive, one line each and what to do about problems. Returns the number of problems."""
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    problems = 0
    for finding in findings:
        table = Table.grid(padding=(0, 2))
        table.add_column(width=len("problem"))
        table.add_column(width=28, overflow="fold")
        table.add_column(overflow="fold")
        status = "problem" if not finding.ok else "note" if finding.note else "ok"
        table.add_row(Text(status, colours[status]), Text(finding.subject), Text(finding.message))
        if not finding.ok:
            problems += 1
            if finding.fix:
                table.add_row("", Text("what to do", "yellow"), Text(finding.fix))
        console.print(table)
    return problems


class DatasetSample(NamedTuple):
    """The kept rows of a dataset as rewards get them, taken from all rows or only from the first ones."""

    rows: list[Row]
    """Rows with all columns, as stages read them from prompt sets."""
    prompts: list[Any]
    """The prompt of each row: messages or a string."""
    read: int
    """Number of rows in the dataset."""
    counts: Mapping[str, int] = {}
    """Numbers of rows templated, kept, and dropped by reason; empty without a tokenizer."""
    episodes: Sequence[EpisodeRecord] = ()
    """Episodes of the first rows, if the run has tools."""

    @property
    def is_whole(self) -> bool:
        """True if all rows were templated, not just the first ones."""
        return self.counts.get("rows", len(self.rows)) == self.read


class EpisodeTrial(NamedTuple):
    """The parts that play episodes."""

    config: Config
    pool: EnvironmentPool
    reader: CallReader
    templater: Templater


@dataclass
class RunInputs:
    """The inputs of a run. Each is set when its check passes; a check that needs an unset one yields nothing."""

    config: Config
    scratch: Path
    """Empty folder for a model that a function builds."""
    stack: ExitStack
    """Ends the processes of tools and environments."""
    model: Policy | None = None
    """The model; its tokenizer can be loaded."""
    trial: EpisodeTrial | None = None
    """Plays episodes, in a run with tools."""
    datasets: dict[str, DatasetSample] = field(default_factory=dict)
    """Datasets by their keys in the configuration."""
