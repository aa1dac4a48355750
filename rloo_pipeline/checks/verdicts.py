"""Every check's number held against its limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rloo_pipeline.checks import engines, groups, samples, tokens  # noqa: F401, they register
from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.registry import CHECKS, Limit, Side


def judge(evidence: Evidence, limits: Mapping[str, Limit], accepted: Collection[str]) -> list[dict[str, Any]]:
    """Every check that applies, as checks.json has it: value, limits, verdict, advice.

    Args:
        evidence: of the trial.
        limits: by name of the check, in the order in which they are shown.
        accepted: checks whose failure does not stop the run; they stay marked.
    """
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
