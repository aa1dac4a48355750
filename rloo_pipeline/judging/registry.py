"""Checks: a check is a number that is bad above or below its limits, with advice for either case.

A check is a function decorated with `@check(bad=side)`, which takes `Evidence` and returns a `CheckResult`, or None if
it does not apply. Its name is also the key of its limits in the configuration (`checks.limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from rloo_pipeline.judging.evidence import Evidence

Side = Literal["above", "below"]
Limit = tuple[float | None, float | None]
"""The values at which a check warns and fails."""


class CheckResult(NamedTuple):
    """The value of a check, with a sentence for either verdict."""

    value: float | None
    shown: str
    """The value as text, with its interval if it has one."""
    meaning: str
    """One sentence for a check that passes."""
    cure: str
    """One sentence on what to do if it does not."""


CheckFunction = Callable[[Evidence], CheckResult | None]


class Check(NamedTuple):
    """A function and how its value is judged."""

    measure: CheckFunction
    bad: Side
    """Side of the limits on which a value is bad."""
    sft: bool
    """True if demonstrations can cure it, so that `warmstart.train: auto` trains on them."""


CHECKS: dict[str, Check] = {}
"""All checks by name."""


def check(bad: Side, sft: bool = False) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a function as a check under its name."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[function.__name__] = Check(function, bad, sft)
        return function

    return register


def threshold(limits: Mapping[str, Any]) -> str:
    """The limits of a check as text, such as `warn above 0.2, fail above 0.9`."""
    texts = [
        f"{verdict} {limits['bad']} {limits[verdict]:g}" for verdict in ("warn", "fail") if limits[verdict] is not None
    ]
    return ", ".join(texts) or "–"
