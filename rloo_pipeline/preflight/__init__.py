"""What a node must have before a run is submitted: looked at offline, one finding a line, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console


class Finding(NamedTuple):
    """What was found of one thing."""

    what: str
    ok: bool
    said: str
    cure: str = ""
    """What to do where it is not ok, if that is not said yet."""
    note: bool = False
    """It may go wrong, or could not be looked at."""


def show(findings: Iterable[Finding], console: Console) -> int:
    """Prints a line for each thing and what to do about problems, as soon as it is known; the number of problems."""
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": "green", "note": "yellow", "problem": "red"}
    problems = 0
    for finding in findings:
        table = Table.grid(padding=(0, 2))
        table.add_column(width=len("problem"))
        table.add_column(width=28, overflow="fold")
        table.add_column(overflow="fold")
        word = "problem" if not finding.ok else "note" if finding.note else "ok"
        table.add_row(Text(word, marks[word]), Text(finding.what), Text(finding.said))
        if not finding.ok:
            problems += 1
            if finding.cure:
                table.add_row("", Text("what to do", "yellow"), Text(finding.cure))
        console.print(table)
    return problems
