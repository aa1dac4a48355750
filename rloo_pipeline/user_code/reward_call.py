"""One call of a reward function: the arguments that it gets and the results that it may return.

Worker processes import this module, so it imports almost nothing.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from math import inf, isfinite
from typing import Any, NamedTuple

from rloo_pipeline.errors import counted, one_line

Scores = list[float | None]
OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments that functions get in addition to dataset columns."""
OF_TRAINER = ("trainer_state", "log_extra", "log_metric")
"""Arguments that only TRL's trainer passes."""


OTHERS = "other_completions"
"""Name of the argument with the completions that a judge compares with."""


class BadOutputError(Exception):
    """A function did not return one finite number or None per completion; the message names the row."""


class Signature(NamedTuple):
    """The parameters of a reward function, as plain values that can be sent to another process."""

    named: tuple[str, ...]
    required: tuple[str, ...]
    """The `named` parameters without a default."""
    variadic: bool
    """The function has `**kwargs`, so it gets every argument."""
    asynchronous: bool

    def takes(self, offered: Mapping[str, Any]) -> list[str]:
        """The names in `offered` that are passed to the function."""
        return [name for name in offered if self.variadic or name in self.named]


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of a function, or of an object's `__call__`."""
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
    """Records that a row has no score because of a failure, not because the reward does not apply.

    The reason goes into the column `error` of the scores and counts in the metric `scoring_errors`. A reward function
    must call this on the thread on which it was called.

    Args:
        place: index of the completion in the call, from 0.
        why: the reason, in words that follow the function's name: `got a reply without a score`.
    """
    notes = _notes.get()
    if notes is not None:
        notes[place] = one_line(why, 500)


def score_refused(scores: Scores, refused: Mapping[int, str], prompts: Sequence[Any]) -> Scores:
    """Scores completions that a service or model refused to read, and records the reasons.

    If another completion of the same prompt was accepted, the refused completion itself is the cause. It gets 0, or the
    lowest score of the others if that is below 0, so that a policy gains nothing by being refused. Otherwise the cause
    may be the prompt or the service, and the score is None.

    Args:
        scores: scores of a call's completions.
        refused: reasons by index of the refused completions.
        prompts: the call's prompts, one per completion.
    """
    lowest: dict[str, float] = {}  # score of the accepted completions of a prompt, or 0
    for prompt, score in ((prompts[place], scores[place]) for place in range(len(scores)) if place not in refused):
        lowest[repr(prompt)] = min(lowest.get(repr(prompt), 0.0), 0.0 if score is None else score)
    scored = list(scores)
    for place, why in refused.items():
        unscored(place, why)
        scored[place] = lowest.get(repr(prompts[place]))
    return scored


def collect_notes() -> dict[int, str]:
    """Starts a call: returns the dictionary that `unscored` fills, keyed by index of the completion."""
    notes: dict[int, str] = {}
    _notes.set(notes)
    return notes


def checked_scores(returned: Any, rows: Sequence[int], notes: Iterable[Any] = ()) -> Scores:
    """Checks that a function returned one finite number or None for each of `rows`.

    As in TRL, anything that `float` converts counts as a number, including True and False, but not strings such as
    "0.5". The indices in `notes` must be those of completions in the call.

    Raises:
        BadOutputError: the check fails.
    """
    for place in notes:
        if place not in range(len(rows)):
            raise BadOutputError(
                f"called unscored with {place!r:.50} for {rows_text(rows)}; a place is from 0 to {len(rows) - 1}, the "
                "index of the completion in the call"
            )
    if type(returned) is list and len(returned) == len(rows) and all(map(_is_score, returned)):  # the common case
        return returned.copy()  # copied, since the function may keep its list and modify it
    if not isinstance(returned, Sequence) and hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes | bytearray | memoryview):
        raise BadOutputError(f"returned {type(returned).__name__}, not a list with one number or None per completion")
    if len(returned) != len(rows):
        count = f"{counted(len(returned), 'score')} for {counted(len(rows), 'completion')}"
        raise BadOutputError(f"returned {count} ({rows_text(rows)}); return one number or None per completion")
    return [_number(value, row) for value, row in zip(returned, rows, strict=True)]


def _is_score(value: Any) -> bool:
    return value is None or (type(value) is float and isfinite(value))


def _number(value: Any, row: int) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would read some of them
            raise TypeError
        number = float(value)
    except OverflowError:
        number = inf
    except (TypeError, ValueError):
        raise BadOutputError(
            f"returned {value!r:.100} for row {row}, which is of type {type(value).__name__} and not a number or None; "
            "return one of these"
        ) from None
    if not isfinite(number):
        raise BadOutputError(f"returned {number} for row {row}; return None where a completion cannot be scored")
    return number


def rows_text(rows: Sequence[int]) -> str:
    """`row 3` or `rows 3 to 6`, counted from 0."""
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
