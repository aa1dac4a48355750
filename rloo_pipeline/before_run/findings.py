"""Findings of the checks before a run, how they are shown, and the inputs that checks pass on to later checks."""

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
    """Advice on the problem, if the message does not give it."""
    note: bool = False
    """True if an ok finding needs attention: it may fail later, or could not be checked."""

    @property
    def sentence(self) -> str:
        """The problem as an error message."""
        return f"{self.subject}: {self.message}; {self.fix}"


@contextmanager
def problems_of(subject: str, fix: str = "") -> Iterator[list[Finding]]:
    """Context manager for checks. It adds a finding to the list if a UserError ends the block, or a note if the block
    needs a library that is not installed here.
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
    """Prints findings as they arrive, one line each, with advice on problems. Returns the number of problems."""
    from rich.table import Column, Table
    from rich.text import Text

    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    problems, width = 0, min(28, console.width // 4)
    for finding in findings:
        columns = Column(width=len("problem")), Column(width=width, overflow="fold"), Column(overflow="fold")
        table = Table.grid(*columns, padding=(0, 2))
        status = "problem" if not finding.ok else "note" if finding.note else "ok"
        table.add_row(Text(status, colours[status]), Text(finding.subject), Text(finding.message))
        if not finding.ok:
            problems += 1
            if finding.fix:
                table.add_row("", Text("what to do", "yellow"), Text(finding.fix))
        console.print(table)
    return problems


class DatasetSample(NamedTuple):
    """Rows of a dataset that were kept, as rewards get them. They come from all rows, or only from the first ones."""

    rows: list[Row]
    """The rows with all columns, as stages read them from prompt sets."""
    prompts: list[Any]
    """The prompt of each row: messages or a string."""
    read: int
    """Number of rows in the dataset."""
    counts: Mapping[str, int] = {}
    """Number of rows templated, kept, and dropped for each reason; empty without a tokenizer."""
    episodes: Sequence[EpisodeRecord] = ()
    """Episodes played on the first rows, if the run has tools."""

    @property
    def is_whole(self) -> bool:
        """True if all rows were templated, not just the first ones."""
        return self.counts.get("rows", len(self.rows)) == self.read


class EpisodeTrial(NamedTuple):
    """The parts needed to play episodes."""

    config: Config
    pool: EnvironmentPool
    reader: CallReader
    templater: Templater


@dataclass
class RunInputs:
    """The inputs of a run. Each is set once its check passes, and checks that need an unset one are skipped."""

    config: Config
    scratch: Path
    """Empty folder for a model that a function builds."""
    stack: ExitStack
    """Ends the processes of tools and environments."""
    model: Policy | None = None
    """The model, once its tokenizer has been loaded."""
    trial: EpisodeTrial | None = None
    """Parts to play episodes, in a run with tools."""
    datasets: dict[str, DatasetSample] = field(default_factory=dict)
    """Datasets by configuration key."""
