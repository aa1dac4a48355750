"""Why jobs would run, in words: what Snakemake prints as 3.5 kB of parameters becomes `report.title: A → B: 1 job`.

Snakemake gives the reason of a job as one string, which is taken apart here (`Reason.__str__` in snakemake/jobs.py and
`ParamsChange.__str__` in snakemake/persistence).
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

PARAMS = re.compile(
    r"Params have changed since last execution: Union of exclusive params before and now across all output: "
    r"(?P<changes>before: .* now: .*?) ?(?=; Software environment definition|$)",
    re.DOTALL,
)
NOTHING = "<nothing exclusive>"
SENTENCES = (
    ("Forced execution", "asked for by --force, --forceall or --forcerun"),
    ("Missing output files", "output missing"),
    ("Incomplete output files", "output incomplete"),
    ("Set of input files has changed", "other input files than in the last run"),
    ("Code has changed", "the rule has changed"),
    ("Software environment definition has changed", "the image has changed"),
)
FOLLOWS = "depends on a job that runs again"
LONGEST_VALUE = 60
"""Characters of a value that are shown."""
MOST_CHANGES = 4
"""Changed keys that are named for one job."""


class PlannedJob(NamedTuple):
    """A job of a dry run."""

    rule: str
    reason: str
    """Snakemake's."""
    log: str | None = None
    """Its log, if it writes one."""


def explain(jobs: Iterable[PlannedJob]) -> list[str]:
    """One line for each reason, with the number of its jobs and their rules.

    A job that has a reason of its own is counted there, not among those that depend on it.
    """
    rules: dict[str, Counter[str]] = defaultdict(Counter)
    for job in jobs:
        rules["; ".join(_why(job.reason)) or FOLLOWS][job.rule] += 1
    last = rules.pop(FOLLOWS, None)
    if last:
        rules[FOLLOWS] = last
    return [f"{why}: {_count(count.total())} ({_names(count)})" for why, count in rules.items()]


def _count(jobs: int) -> str:
    return f"{jobs} job" if jobs == 1 else f"{jobs} jobs"


def _names(rules: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in rules.items())


def _why(reason: str) -> Iterator[str]:
    """The reasons of one job in words, without that of depending on a job that runs again."""
    params = PARAMS.search(reason)
    rest = PARAMS.sub("", reason)
    yield from (text for start, text in SENTENCES if re.search(rf"(?:^|; ){start}", rest))
    if newer := re.search(r"(?:^|; )Updated input files: ([^;]+)", rest):
        yield f"newer input {_shortened(newer[1])}"
    if params:
        changes = list(_changes(params["changes"]))
        yield ", ".join(changes[:MOST_CHANGES])
        if len(changes) > MOST_CHANGES:
            yield f"{len(changes) - MOST_CHANGES} more keys"


def _changes(text: str) -> Iterator[str]:
    """Differences in `before: A,B now: C,D`, lists of parameters as Python writes them."""
    sides = text.removeprefix("before: ").split(" now: ")
    for cut in range(1, len(sides)):
        try:
            before, now = (_literals(" now: ".join(half)) for half in (sides[:cut], sides[cut:]))
        except (ValueError, SyntaxError, MemoryError):
            continue
        yield from _differences(before, now)
        return
    yield "other parameters"


def _literals(text: str) -> list[Any]:
    return [] if text.strip() == NOTHING else list(ast.literal_eval(f"[{text}]"))


def _differences(before: list[Any], now: list[Any]) -> Iterator[str]:
    """Configuration keys that differ, and whether the code of the stage does: `source` is the one text among them."""
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in sorted(old.keys() | new.keys()):
        old_value, new_value = (_value(values[key]) if key in values else "(not set)" for values in (old, new))
        if (key in old) != (key in new) or old[key] != new[key]:
            yield f"{key}: {old_value} → {new_value}"
    if any(isinstance(value, str) for value in [*before, *now]):
        yield "the stage's source code has changed"


def _flat(parameters: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, of all parameters that are mappings."""
    for parameter in parameters:
        if isinstance(parameter, Mapping):
            yield from _under("", parameter)


def _under(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _under(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _under(f"{prefix}[{number}]", inner)
    else:
        yield prefix, value


def _value(value: Any) -> str:
    return _shortened(value if isinstance(value, str) and value else repr(value))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
