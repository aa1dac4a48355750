"""Checks of the groups: RLOO learns nothing from a group whose rewards are all equal."""

from __future__ import annotations

from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.mixing import LARGEST, Mixing, fit
from rloo_pipeline.checks.registry import CheckResult, check

WANTED = 0.8
"""Share of mixed groups for which the check `mixed` names a K."""


@check(bad="above", warn=0.5)
def all_right(evidence: Evidence) -> CheckResult:
    """Share of groups whose completions are all right."""
    share = float(evidence.right.all(axis=1).mean())
    return CheckResult(
        share,
        f"{share:.1%} of {len(evidence.right)} groups",
        "Some prompts are still unsolved.",
        "The policy always solves these prompts: use harder ones.",
    )


@check(bad="above", warn=0.8, sft=True)
def all_wrong(evidence: Evidence) -> CheckResult:
    """Share of groups none of whose completions is right."""
    share = float((~evidence.right).all(axis=1).mean())
    return CheckResult(
        share,
        f"{share:.1%} of {len(evidence.right)} groups",
        "Most prompts are solved at least sometimes.",
        "Most groups have no right answer: train on demonstrations first (warmstart.sft), use easier prompts, or raise "
        "rollout.num_generations.",
    )


@check(bad="below", warn=0.2)
def mixed(evidence: Evidence) -> CheckResult:
    """Share of groups with both right and wrong completions, and the K at which 80% of groups would have both."""
    share, mixing = mixed_share(evidence), mixing_of(evidence)
    if mixing is None:
        forecast = "all groups are alike, so no K can be estimated"
    elif k := mixing.samples_for(WANTED):
        forecast = f"{WANTED:.0%} would be mixed at K = {k} (beta-binomial)"
    else:
        forecast = f"no K up to {LARGEST} would mix {WANTED:.0%} (beta-binomial)"
    return CheckResult(
        share,
        f"{share:.1%} of groups at K = {evidence.right.shape[1]}; {forecast}",
        "Many groups have both right and wrong answers, from which RLOO learns.",
        f"Few groups have both right and wrong answers; {forecast}.",
    )


@check(bad="above", warn=0.8)
def wasted(evidence: Evidence) -> CheckResult:
    """Expected share of a round's completions in groups that are all right or all wrong, at the rounds' K."""
    mixing = mixing_of(evidence)
    share = 1 - (mixing.mixed(evidence.num_generations) if mixing else mixed_share(evidence))
    return CheckResult(
        share,
        f"{share:.1%} at K = {evidence.num_generations} ({'beta-binomial' if mixing else 'all groups are alike'})",
        "Most completions of a round belong to groups with both right and wrong answers.",
        "Most completions of a round would teach nothing about right and wrong: raise rollout.num_generations, or "
        "set rollout.oversample to choose among groups.",
    )


@check(bad="below", warn=0.2, fail=0.01, sft=True)
def teaching(evidence: Evidence) -> CheckResult | None:
    """Share of groups with at least two different rewards; does not apply to a run that learns from a teacher alone."""
    if not evidence.rewarded:
        return None
    import numpy as np

    from rloo_pipeline.checks.statistics import informative

    scored = evidence.rewards[~np.isnan(evidence.rewards)]
    share = informative(evidence.rewards)
    alike = (
        f"all {len(scored)} scored completions of all probe prompts got the same reward ({scored[0]:g})"
        if len(scored) and share == 0
        else f"only {share:.0%} of groups have different rewards"
    )
    return CheckResult(
        share,
        f"{share:.1%} of groups",
        "Rewards differ within the groups.",
        f"{alike}, so RLOO could learn {'nothing' if share == 0 else 'little'}; train on demonstrations first "
        "(warmstart.sft), use easier prompts or rewards, or raise rollout.temperature or num_generations.",
    )


def mixed_share(evidence: Evidence) -> float:
    """Share of the probe's groups that have both right and wrong completions."""
    return float((evidence.right.any(axis=1) & ~evidence.right.all(axis=1)).mean())


def mixing_of(evidence: Evidence) -> Mixing | None:
    """The distribution over prompts of the chance that a completion is right; None if all groups are alike."""
    return fit(evidence.right.sum(axis=1), evidence.right.shape[1])
