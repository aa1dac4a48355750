"""`STAGES`: the sections of the configuration that each stage gets, and those that decide its result.

Converts the table of stages to the form that pydantic needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rloo_pipeline.config.run_keys import RunKeys
from rloo_pipeline.config.section import section_in
from rloo_pipeline.stages import table

But = dict[str, Any]
"""Per section, a set of keys, or a mapping of keys to True or to a set of nested keys (pydantic's `exclude`)."""


class Sections(NamedTuple):
    """Sections of the configuration that a stage gets."""

    decides: tuple[str, ...]
    """Sections that its result depends on."""
    reads: tuple[str, ...]
    """Sections that affect only where and how it runs, or what it reports besides its result."""
    but: But
    """Keys of `decides` sections that do not affect the result."""


def _sections() -> Iterator[tuple[str, Sections]]:
    fields = {name: _keys(field.annotation) for name, field in RunKeys.model_fields.items()}
    for row in table.stages():
        but: But = {}
        for path, keys in (row.decides or {}).items():
            section, _, key = path.partition(".")
            if key:
                but[section] = {**dict.fromkeys(fields[section] - {key}, True), key: _without(keys, set())}
            elif excluded := _without(keys, fields[section]):
                but[section] = excluded
        yield row.stage, Sections(tuple(path.partition(".")[0] for path in row.decides or {}), row.reads, but)


def _keys(annotation: Any) -> set[str]:
    section = section_in(annotation)
    return set(section.model_fields) if section else set()


def _without(keys: table.Keys, fields: set[str]) -> set[str]:
    """Keys of a section that do not count for reruns."""
    kind, names = keys or ("but", frozenset())
    return set(names) if kind == "but" else fields - names


STAGES: Mapping[str, Sections] = dict(_sections())
