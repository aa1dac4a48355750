"""Checks and symptoms register here with their limits, which are keys of the configuration under their names. `judge`
runs the checks.

A check is a function decorated with `@check`. Its parameters are fields of `Evidence`; it does not apply if one of them
is None, or if it returns None instead of a `CheckResult`. A symptom is a function decorated with `@symptom`, which
takes the history of a run up to a round and returns its evidence as text, or None. Its limits are its keyword
arguments, with their defaults and bounds, described under "Limits:" in its docstring.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import Field

from rloo_pipeline.checks.evidence import Evidence

Side = Literal["above", "below"]
Limit = tuple[float | None, float | None]
"""The values at which a check warns and fails; None means never."""
Bound = float | None | Mapping[str, float]
"""One of the two values, or one for each number format."""
F = TypeVar("F", bound=Callable[..., str | None])


class CheckResult(NamedTuple):
    """The value of a check, with a sentence for either verdict."""

    value: float | None
    """None, NaN and infinity exceed any limit."""
    shown: str
    """The value as text, with its interval if it has one."""
    meaning: str
    """One sentence for a check that passes."""
    cure: str
    """One sentence on what to do if it does not."""


CheckFunction = Callable[..., CheckResult | None]


class Check(NamedTuple):
    """A function and how its value is judged."""

    measure: CheckFunction
    bad: Side
    """Side of the limits on which values are bad."""
    warn: Bound
    fail: Bound

    def limit(self, dtype: str) -> Limit:
        """The default limits for a number format."""
        warn, fail = (bound[dtype] if isinstance(bound, Mapping) else bound for bound in (self.warn, self.fail))
        return warn, fail


CHECKS: dict[str, Check] = {}
"""All checks by name."""


def check(bad: Side, *, warn: Bound = None, fail: Bound = None) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a function as a check under its name."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[function.__name__] = Check(function, bad, warn, fail)
        return function

    return register


def judge(evidence: Evidence, limits: Mapping[str, Limit], accepted: Collection[str]) -> list[dict[str, Any]]:
    """Runs every check that applies.

    Args:
        evidence: evidence from the probe.
        limits: (warn, fail) by the check's name, in the order of the result.
        accepted: checks whose failure does not stop the run; they stay marked as failed.

    Returns:
        One entry of checks.json per check: value, limits, verdict, advice.
    """
    verdicts = []
    for name, (warn, fail) in limits.items():
        check = CHECKS[name]
        needed = {part: getattr(evidence, part) for part in inspect.signature(check.measure).parameters}
        if any(part is None for part in needed.values()) or (result := check.measure(**needed)) is None:
            continue
        # NaN compares as within any limit, and JSON has neither NaN nor infinity
        value = result.value if result.value is not None and isfinite(result.value) else None
        verdict = verdict_of(value, warn, fail, check.bad)
        verdicts.append(
            {
                "name": name,
                "value": value,
                "shown": result.shown,
                "limits": {"warn": warn, "fail": fail, "bad": check.bad},
                "verdict": verdict,
                "accepted": verdict == "fail" and name in accepted,
                "advice": result.meaning if verdict == "pass" else result.cure,
            }
        )
    return verdicts


def verdict_of(value: float | None, warn: float | None, fail: float | None, bad: Side) -> str:
    """Returns pass, warn or fail; a missing value exceeds any limit."""

    def beyond(limit: float | None) -> bool:
        return limit is not None and (value is None or (value > limit if bad == "above" else value < limit))

    return "fail" if beyond(fail) else "warn" if beyond(warn) else "pass"


class SymptomRule(NamedTuple):
    """A symptom that `judging.diagnosis` looks for."""

    title: str
    cure: str
    evidence: Callable[..., str | None] | None
    """None if the evidence is in logs."""
    description: str
    limits: Mapping[str, tuple[Any, Any]] = {}
    """By name: the annotated type (with bounds and description) and the default."""


SYMPTOMS: dict[str, SymptomRule] = {}
"""All symptoms by name."""


def symptom(title: str, cure: str) -> Callable[[F], F]:
    """Registers a function as a symptom under its name, which is the key of its section in `gates`."""

    def register(function: F) -> F:
        SYMPTOMS[function.__name__] = SymptomRule(title, cure, function, summary(function), dict(_limits(function)))
        return function

    return register


def summary(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring, in one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def _limits(function: Callable[..., Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    hints = get_type_hints(function, include_extras=True)
    described = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", inspect.getdoc(function) or "", re.MULTILINE))
    for name, default in (function.__kwdefaults__ or {}).items():
        text = " ".join(described[name].split())
        yield name, (Annotated[hints[name], Field(description=text[0].upper() + text[1:])], default)


def threshold(limits: Mapping[str, Any]) -> str:
    """The limits of a check as text, such as `warn above 0.2, fail above 0.9`."""
    texts = [
        f"{verdict} {limits['bad']} {limits[verdict]:g}" for verdict in ("warn", "fail") if limits[verdict] is not None
    ]
    return ", ".join(texts) or "–"
