"""Checks of the probe completions: rewards, format, length, variety."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo_pipeline.checks.registry import CheckResult, check

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rloo_pipeline.checks.statistics import Array, Estimate, Flags

RESAMPLES = 2000
"""Bootstrap resamples in the check `mean_reward`."""


@check(bad="below", warn=0.9, fail=0.01)
def scorable(rewards: Array, rewarded: bool) -> CheckResult | None:
    """Share of completions that have a reward; does not apply to a run that learns from a teacher alone."""
    if not rewarded:
        return None
    import numpy as np

    share = float(np.mean(~np.isnan(rewards)))
    return CheckResult(
        share,
        f"{share:.1%}",
        "The reward functions score the completions.",
        "no reward function could score most completions of the probe prompts; check the columns that they read.",
    )


@check(bad="below")
def mean_reward(rewards: Array, seed: int) -> CheckResult:
    """Mean over prompts of the mean reward of a prompt's scorable completions."""
    from rloo_pipeline.checks.statistics import estimate_scores

    estimate = estimate_scores(rewards, RESAMPLES, seed)
    if estimate is None:
        return CheckResult(None, "–", "", "no completion has a reward; check the columns that the rewards read.")
    return CheckResult(
        estimate.value,
        f"{estimate.value:.3g}" + (" ({:.3g} to {:.3g})".format(*estimate.ci95) if estimate.ci95 else ", each"),
        "The reward at the start of the first round.",
        "The rewards are low: use easier prompts or rewards, or train on demonstrations first.",
    )


@check(bad="below")
def pass_at_1(right: Flags) -> CheckResult:
    """Chance that a completion is right."""
    from rloo_pipeline.checks.statistics import estimate_share, pass_at_ks

    estimate = estimate_share(pass_at_ks(right)[1], right.shape[1])
    text = _share(estimate)
    return CheckResult(estimate.value, text, "The share of right answers at the first try.", "Few answers are right.")


@check(bad="below", warn=0.1)
def pass_at_k(right: Flags) -> CheckResult:
    """Chance that one of K completions is right (Chen et al. 2021), for the largest power of 2 up to the probe's K."""
    from rloo_pipeline.checks.statistics import estimate_share, pass_at_ks

    passes = pass_at_ks(right)
    best = max(passes)
    estimate = estimate_share(passes[best], right.shape[1] // best)
    return CheckResult(
        estimate.value,
        f"pass@{best} {_share(estimate)}",
        "The policy solves many of the prompts at least sometimes.",
        "Most prompts are never solved, so RLOO has nothing to reinforce: train on demonstrations first "
        "(warmstart.sft), or use easier prompts.",
    )


@check(bad="above", warn=0.2)
def truncated(truncated: Flags, lengths: NDArray[np.int64], longest: int) -> CheckResult:
    """Share of completions that reach the length limit."""
    import numpy as np

    share = float(truncated.mean())
    low, middle, high = (int(np.quantile(lengths, q, method="nearest")) for q in (0.05, 0.5, 0.95))
    return CheckResult(
        share,
        f"{share:.1%}; median length {middle} tokens, 90% from {low} to {high}, limit {longest}",
        "Completions end by themselves.",
        "Many completions are cut before their answer: raise rollout.max_completion_length, or ask for shorter ones.",
    )


@check(bad="below", warn=0.5)
def format_rate(in_form: Flags) -> CheckResult:
    """Share of completions in the format that the reward `checks.format_reward` tests."""
    share = float(in_form.mean())
    return CheckResult(
        share,
        f"{share:.1%}",
        "The policy knows the format of an answer.",
        "The policy does not know the format of an answer: state it in the prompt, or train on demonstrations first.",
    )


@check(bad="above", warn=0.8)
def duplicates(texts: list[list[str]]) -> CheckResult:
    """Share of completions that repeat another completion of their group word for word."""
    import numpy as np

    share = float(np.mean([1 - len(set(group)) / len(group) for group in texts]))
    return CheckResult(
        share,
        f"{share:.1%}",
        "The completions of a group differ.",
        "Most completions repeat another of their group, which teaches nothing: raise rollout.temperature.",
    )


def _share(estimate: Estimate) -> str:
    low, high = estimate.ci95 or (0.0, 1.0)
    return f"{estimate.value:.1%} ({low:.1%} to {high:.1%})"
