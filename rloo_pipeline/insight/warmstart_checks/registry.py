"""What a check is: one number, its limits, a verdict and one sentence.

A check is a plain function from `Evidence` to a `Measure`, or None where it does not apply, under `@check(name)`. The
name is also the key of its limits in the configuration (`checks.limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from rloo_pipeline.insight.warmstart_checks.evidence import Evidence

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


def judge(evidence: Evidence, limits: Mapping[str, Limit], accepted: Collection[str]) -> list[dict[str, Any]]:
    """Every check that applies, as checks.json has it: value, limits, verdict, advice.

    Args:
        evidence: of the trial.
        limits: by name of the check, in the order in which they are shown.
        accepted: checks whose failure does not stop the run; they stay marked.
    """
    from rloo_pipeline.insight.warmstart_checks import engines, groups, samples, tokens  # noqa: F401, they register

    found = []
    for name in limits:
        one = CHECKS[name]
        measure = one.measure(evidence)
        if measure is None:
            continue
        warn, fail = limits[one.name]
        verdict = verdict_of(measure.value, warn, fail, one.bad)
        found.append(
            {
                "name": one.name,
                "value": measure.value,
                "shown": measure.shown,
                "limits": {"warn": warn, "fail": fail, "bad": one.bad},
                "verdict": verdict,
                "accepted": verdict == "fail" and one.name in accepted,
                "asks_for_sft": one.sft and verdict != "pass",
                "advice": measure.meaning if verdict == "pass" else measure.cure,
            }
        )
    return found


def verdict_of(value: float | None, warn: float | None, fail: float | None, bad: Side) -> str:
    """pass, warn or fail; a value that does not exist is worse than any limit."""

    def beyond(limit: float | None) -> bool:
        return limit is not None and (value is None or (value > limit if bad == "above" else value < limit))

    return "fail" if beyond(fail) else "warn" if beyond(warn) else "pass"


def threshold(limits: Mapping[str, Any]) -> str:
    """The limits of a check for people, such as `warn above 0.2, fail above 0.9`."""
    said = [f"{what} {limits['bad']} {limits[what]:g}" for what in ("warn", "fail") if limits[what] is not None]
    return ", ".join(said) or "–"
