"""The rows of `make gpu`, which are in rows.yaml.

A row calls a function of this folder in a process of its own. It passes if the function returns its figures, and fails
with the sentence of what the function raises. The rehearsal calls the same function with other options, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Figures = dict[str, float | int | str]
"""Figures of a row by name; the name of a number ends with its unit."""


class RowError(Exception):
    """A row has failed; the message is the sentence that the page shows, beside the figures so far."""

    def __init__(self, why: str, figures: Figures | None = None) -> None:
        super().__init__(why)
        self.figures = figures or {}


class NotHereError(Exception):
    """A row cannot run on this machine; the message says why."""


class Row(NamedTuple):
    """One row."""

    name: str
    shows: str
    function: str
    """`module:function` of this folder. It gets an empty folder and the options."""
    minutes: float
    """Time limit on a GPU."""
    options: Mapping[str, Any] = {}
    rehearse: Mapping[str, Any] | str = {}
    """Options that differ in the rehearsal, or the reason why a CPU cannot run the row."""
    needs: Sequence[str] = ("gpu",)
    """See `machine.missing`."""
    alone: bool = False
    """Needs the machine to itself, also with `--together`: it measures, or its engine takes all memory of the card."""


MINI = {"function": "whole_runs:mini", "minutes": 12, "rehearse": {"dry": True}}


def _rows(entry: dict[str, Any]) -> Iterator[Row]:
    """The rows that an entry of rows.yaml stands for."""
    if mini := entry.pop("mini", None):
        entry = {**MINI, **entry, "name": f"mini-{mini}", "shows": f"the mini configuration: {entry['shows']}"}
    if changes := entry.pop("changes", None):
        entry["options"] = {"changes": changes}
    if (kinds := entry.pop("kinds", None)) is None:
        yield Row(**entry)
    for kind in kinds or ():
        name, shows = (entry[key].replace("KIND", kind) for key in ("name", "shows"))
        yield Row(**{**entry, "name": name, "shows": shows, "options": {"kind": kind}})


ROWS = [row for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()) for row in _rows(entry)]
