"""Checks a node and a configuration before a run is submitted; works offline and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from rloo_pipeline.runtime.console import Terminal


class Finding(NamedTuple):
    """The result of one check."""

    subject: str
    ok: bool
    message: str
    fix: str = ""
    """Advice on a problem, if the message does not give it."""
    note: bool = False
    """True if an ok finding needs attention: it may fail later, or could not be checked."""


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
