"""`STAGES`: the sections of the configuration that each stage gets, and those that decide its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rloo_pipeline.stages.table import ROWS, Keys


class Sections(NamedTuple):
    """Sections of the configuration that a stage gets."""

    decides: Mapping[str, Any]
    """Sections that its result depends on, with the keys that count; True for all (pydantic's `include`)."""
    but: Mapping[str, Any]
    """Keys of these sections that do not count (pydantic's `exclude`)."""
    reads: tuple[str, ...]
    """Sections that affect only where and how it runs, or what it reports besides its result."""


def _sections(parts: Mapping[str, Keys], reads: tuple[str, ...]) -> Sections:
    decides: dict[str, Any] = {}
    excluded: dict[str, Any] = {}
    for path, (only, but) in parts.items():
        section, _, key = path.partition(".")
        decides[section], excluded[section] = ({key: only}, {key: but}) if key else (only, but)
    return Sections(decides, excluded, reads)


STAGES: Mapping[str, Sections] = {
    row.stage: _sections(row.decides, row.reads) for row in ROWS if row.decides is not None
}
