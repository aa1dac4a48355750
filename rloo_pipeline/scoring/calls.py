"""One call of a reward function: what it is called with, and what it may give back.

This is the part of scoring that runs in the worker processes, so it imports next to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from math import isfinite
from typing import Any, NamedTuple

Scores = list[float | None]
OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""What functions are given besides the dataset's columns."""


class BadOutputError(Exception):
    """A function returned something else than one finite number or None a completion; says what, and for which row."""


class Signature(NamedTuple):
    """What a reward function takes, as plain values that can cross to another process."""

    named: tuple[str, ...]
    required: tuple[str, ...]
    """Those of `named` that have no default."""
    variadic: bool
    """It has `**kwargs` and gets everything."""
    asynchronous: bool

    def takes(self, offered: Mapping[str, Any]) -> list[str]:
        """The names among `offered` that the function is called with."""
        return [name for name in offered if self.variadic or name in self.named]


def signature_of(function: Callable[..., Any]) -> Signature:
    """What a function takes; an object counts by its `__call__`."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    method = getattr(function, "__call__", None)  # noqa: B004
    return Signature(
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method),
    )


_notes: ContextVar[dict[int, str] | None] = ContextVar("notes", default=None)


def unscored(place: int, why: str) -> None:
    """Says why a row gets None where that is a failure and not "does not apply": it comes into the table's column
    `error` and into the metric scoring_errors. To be called by a reward function, on the thread that it was called on.

    Args:
        place: the completion's place in the call, from 0 on.
        why: to be read after the function's name, such as `got a reply without a score`.
    """
    notes = _notes.get()
    if notes is not None:
        notes[place] = " ".join(why.split())[:500]


def fresh_notes() -> dict[int, str]:
    """What `unscored` will be told within the call that begins here, by place."""
    found: dict[int, str] = {}
    _notes.set(found)
    return found


def checked(given: Any, rows: Sequence[int]) -> Scores:
    """What a function returned for these rows of the table, once it is one finite number or None for each. What
    `float` makes a number of is one, True and False too, as in TRL; a text is none, though it may look like one.

    Raises:
        BadOutputError: it is not.
    """
    if type(given) is list and len(given) == len(rows):
        for value in given:
            if value is not None and (type(value) is not float or not isfinite(value)):
                break
        else:
            return given.copy()  # the function may keep its list and write into it
    if not isinstance(given, Sequence) and hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise BadOutputError(f"returned {type(given).__name__}, not a list with one number or None a completion")
    if len(given) != len(rows):
        raise BadOutputError(f"returned {len(given)} scores for {len(rows)} completions ({rows_text(rows)})")
    return [_number(value, row) for value, row in zip(given, rows, strict=True)]


def _number(value: Any, row: int) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would read some of them
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise BadOutputError(
            f"returned {value!r:.100} for row {row}, {_kind(value)} and not a number or None; return float(…) of it"
        ) from None
    if not isfinite(number):
        raise BadOutputError(f"returned {number} for row {row}; return None where a completion cannot be scored")
    return number


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else f"of type {type(value).__name__}"


def rows_text(rows: Sequence[int]) -> str:
    """`row 3` or `rows 3 to 6`, counted from 0."""
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
