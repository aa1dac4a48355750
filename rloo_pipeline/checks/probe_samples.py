"""Checks of the probe completions: rewards, format, length, variety."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.registry import CheckResult, check

if TYPE_CHECKING:
    from rloo_pipeline.checks.statistics import Estimate

RESAMPLES = 2000
"""Bootstrap resamples in the check `mean_reward`."""


@check(bad="below", warn=0.9, fail=0.01)
def scorable(evidence: Evidence) -> CheckResult | None:
    """Share of completions that have a reward; does not apply to a run that learns from a teacher alone."""
    if not evidence.rewarded:
        return None
    import numpy as np

    share = float(np.mean(~np.isnan(evidence.rewards)))
    return CheckResult(
        share,
        f"{share:.1%}",
        "The reward functions score the completions.",
        "no reward function could score most completions of the probe prompts; check the columns that they read.",
    )


@check(bad="below")
def mean_reward(evidence: Evidence) -> CheckResult:
    """Mean over prompts of the mean reward of a prompt's scorable completions."""
    from rloo_pipeline.checks.statistics import estimate_scores

    estimate = estimate_scores(evidence.rewards, RESAMPLES, evidence.seed)
    if estimate is None:
        return CheckResult(None, "–", "", "no completion has a reward; check the columns that the rewards read.")
    return CheckResult(
        estimate.value,
        f"{estimate.value:.3g}" + (" ({:.3g} to {:.3g})".format(*estimate.ci95) if estimate.ci95 else ", each"),
        "The reward at the start of the first round.",
        "The rewards are low: use easier prompts or rewards, or train on demonstrations first.",
    )


@check(bad="below")
def pass_at_1(evidence: Evidence) -> CheckResult:
    """Chance that a completion is right."""
    from rloo_pipeline.checks.statistics import estimate_share, pass_at_ks

    estimate = estimate_share(pass_at_ks(evidence.right)[1], evidence.right.shape[1])
    text = _share(estimate)
    return CheckResult(estimate.value, text, "The share of right answers at the first try.", "Few answers are right.")


@check(bad="below", warn=0.1)
def pass_at_k(evidence: Evidence) -> CheckResult:
    """Chance that one of K completions is right (Chen et al. 2021), for the largest power of 2 up to the probe's K."""
    from rloo_pipeline.checks.statistics import estimate_share, pass_at_ks

    passes = pass_at_ks(evidence.right)
    best = max(passes)
    estimate = estimate_share(passes[best], evidence.right.shape[1] // best)
    return CheckResult(
        estimate.value,
        f"pass@{best} {_share(estimate)}",
        "The policy solves many of the prompts at least sometimes.",
        "Most prompts are never solved, so RLOO has nothing to reinforce: train on demonstrations first "
        "(warmstart.sft), or use easier prompts.",
    )


@check(bad="above", warn=0.2)
def truncated(evidence: Evidence) -> CheckResult:
    """Share of completions that reach the length limit."""
    share = float(evidence.truncated.mean())
    import numpy as np

    low, middle, high = (int(np.quantile(evidence.lengths, q, method="nearest")) for q in (0.05, 0.5, 0.95))
    return CheckResult(
        share,
        f"{share:.1%}; median length {middle} tokens, 90% from {low} to {high}, limit {evidence.longest}",
        "Completions end by themselves.",
        "Many completions are cut before their answer: raise rollout.max_completion_length, or ask for shorter ones.",
    )


@check(bad="below", warn=0.5)
def format_rate(evidence: Evidence) -> CheckResult | None:
    """Share of completions in the format that the reward `checks.format_reward` tests."""
    if evidence.in_form is None:
        return None
    share = float(evidence.in_form.mean())
    return CheckResult(
        share,
        f"{share:.1%}",
        "The policy knows the format of an answer.",
        "The policy does not know the format of an answer: state it in the prompt, or train on demonstrations first.",
    )


@check(bad="above", warn=0.8)
def duplicates(evidence: Evidence) -> CheckResult:
    """Share of completions that repeat another completion of their group word for word."""
    import numpy as np

    share = float(np.mean([1 - len(set(group)) / len(group) for group in evidence.texts]))
    return CheckResult(
        share,
        f"{share:.1%}",
        "The completions of a group differ.",
        "Most completions repeat another of their group, which teaches nothing: raise rollout.temperature.",
    )


def _share(estimate: Estimate) -> str:
    low, high = estimate.ci95 or (0.0, 1.0)
    return f"{estimate.value:.1%} ({low:.1%} to {high:.1%})"
