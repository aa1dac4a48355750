"""What a node must have before a run is submitted: looked at offline, one finding a line, nothing is changed."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """What was found of one thing."""

    what: str
    ok: bool
    said: str
    cure: str = ""
    """What to do where it is not ok."""
