"""Checks of the reward model that the run trains, on held-out preferences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rloo_pipeline.checks.registry import CheckResult, check
from rloo_pipeline.errors import counted

if TYPE_CHECKING:
    from rloo_pipeline.checks.statistics import Array

RESAMPLES = 2000
"""Bootstrap resamples for the interval of the margin."""


def measures(chosen: Array, rejected: Array, keys: Sequence[str], lengths: Array, seed: int) -> dict[str, Any]:
    """Measures a reward model by its rewards for held-out pairs; intervals are over prompts.

    Args:
        chosen: [pairs] rewards.
        rejected: [pairs] rewards.
        keys: [pairs], equal for pairs with the same prompt.
        lengths: [pairs, 2] tokens of the chosen and the rejected conversation.
        seed: seed of the bootstrap.

    Returns:
        `accuracy`, the share of a prompt's pairs in which `chosen` has the higher reward (ties count half), and
        `margin`, their r_chosen − r_rejected, both as means over prompts with their intervals; `length_correlation`
        (Pearson's r) of rewards and lengths, None if either does not vary; and the numbers of pairs and prompts.
    """
    import numpy as np

    from rloo_pipeline.checks.statistics import estimate_mean, estimate_share

    margins = chosen - rejected
    right = np.where(margins == 0, 0.5, margins > 0)
    by_prompt: dict[str, list[int]] = defaultdict(list)
    for pair, key in enumerate(keys):
        by_prompt[key].append(pair)
    groups = list(by_prompt.values())
    samples = 1 / float(np.mean([1 / len(group) for group in groups]))  # prompts may differ in it
    accuracy = estimate_share(np.array([right[group].mean() for group in groups]), samples)
    margin = estimate_mean(np.array([margins[group].mean() for group in groups]), RESAMPLES, seed)
    rewards, tokens = np.concatenate([chosen, rejected]), lengths.T.ravel().astype(np.float64)
    varies = np.ptp(rewards) > 0 and np.ptp(tokens) > 0
    return {
        "pairs": len(keys),
        "prompts": len(groups),
        "accuracy": accuracy._asdict(),
        "margin": margin._asdict(),
        "length_correlation": float(np.corrcoef(rewards, tokens)[0, 1]) if varies else None,
    }


@check(bad="below", warn=0.55, fail=0.5)
def pair_accuracy(preferences: Mapping[str, Any]) -> CheckResult:
    """Lower end of the 95% interval of the reward model's accuracy on held-out preferences."""
    accuracy, margin = preferences["accuracy"], preferences["margin"]
    low, high = accuracy["ci95"]
    of_pairs = f"of the held-out pairs of a prompt, on average over {counted(preferences['prompts'], 'prompt')}"
    shown = f"{accuracy['value']:.1%} ({low:.1%} to {high:.1%}) {of_pairs}"
    chance = "no better than chance" if low <= 0.5 else "hardly better than chance"
    return CheckResult(
        low,
        f"{shown}, mean margin {margin['value']:.3g}",
        "The reward model agrees with the held-out preferences.",
        f"The reward model may be {chance} ({shown}), and the policy would learn what it prefers: give it more or "
        "clearer preferences, more epochs (reward_model.num_train_epochs), a different learning rate, or a better "
        "model to start from (reward_model.name_or_path).",
    )


@check(bad="above", warn=0.8)
def reward_length(preferences: Mapping[str, Any]) -> CheckResult | None:
    """Absolute correlation of the reward model's rewards with the lengths of the held-out conversations."""
    correlation = preferences["length_correlation"]
    if correlation is None:
        return None
    return CheckResult(
        abs(correlation),
        f"r = {correlation:.2f}",
        "Length does not explain the rewards.",
        f"The reward is nearly a function of the length ({'longer' if correlation > 0 else 'shorter'} is better): give "
        "preferences in which length does not decide, or set algorithm.response_length.",
    )
