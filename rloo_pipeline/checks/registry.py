"""What a check is: a number that is bad above or below its limits, and a sentence for either case.

A check is a plain function from `Evidence` to a `Measure`, or None where it does not apply, under `@check(name)`. The
name is also the key of its limits in the configuration (`checks.limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from rloo_pipeline.checks.evidence import Evidence

Side = Literal["above", "below"]
Limit = tuple[float | None, float | None]
"""Where it warns and where it fails."""


class Measure(NamedTuple):
    """What a check found."""

    value: float | None
    shown: str
    """The value for people, with its interval where there is one."""
    meaning: str
    """One sentence where all is well."""
    cure: str
    """One sentence on what to do where it is not."""


class Check(NamedTuple):
    """A function and how its value is judged."""

    name: str
    measure: Callable[[Evidence], Measure | None]
    bad: Side
    """On which side of its limits a value is bad."""
    sft: bool
    """Whether demonstrations can cure it, so that `warmstart.train: auto` trains on them."""


CHECKS: dict[str, Check] = {}
"""All checks by name."""


def check(
    name: str, bad: Side, sft: bool = False
) -> Callable[[Callable[[Evidence], Measure | None]], Callable[[Evidence], Measure | None]]:
    """Registers a function as a check."""

    def register(function: Callable[[Evidence], Measure | None]) -> Callable[[Evidence], Measure | None]:
        CHECKS[name] = Check(name, function, bad, sft)
        return function

    return register


def threshold(limits: Mapping[str, Any]) -> str:
    """The limits of a check for people, such as `warn above 0.2, fail above 0.9`."""
    said = [f"{what} {limits['bad']} {limits[what]:g}" for what in ("warn", "fail") if limits[what] is not None]
    return ", ".join(said) or "–"
