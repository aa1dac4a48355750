"""Judges the number of every check by its limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.registry import CHECKS, Limit, Side


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
        result = check.measure(evidence)
        if result is None:
            continue
        verdict = verdict_of(result.value, warn, fail, check.bad)
        verdicts.append(
            {
                "name": name,
                "value": result.value,
                "shown": result.shown,
                "limits": {"warn": warn, "fail": fail, "bad": check.bad},
                "verdict": verdict,
                "accepted": verdict == "fail" and name in accepted,
                "asks_for_sft": check.sft and verdict != "pass",
                "advice": result.meaning if verdict == "pass" else result.cure,
            }
        )
    return verdicts


def verdict_of(value: float | None, warn: float | None, fail: float | None, bad: Side) -> str:
    """Returns pass, warn or fail; a missing value is beyond any limit."""

    def beyond(limit: float | None) -> bool:
        return limit is not None and (value is None or (value > limit if bad == "above" else value < limit))

    return "fail" if beyond(fail) else "warn" if beyond(warn) else "pass"
