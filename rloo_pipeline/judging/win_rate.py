"""Win rate of a policy against another, by a reward model or a judge that scores each completion alone."""

from __future__ import annotations

import numpy as np

from rloo_pipeline.checks.statistics import Array, Estimate, estimate_mean


def win_rate(before: Array, after: Array, resamples: int, seed: int) -> Estimate | None:
    """Chance that a completion of one policy scores higher than one of the other for the same prompt; ties count half.

    The rate of a prompt is the mean over all pairs of its scored completions; the interval is over prompts.

    Args:
        before: [prompts, samples] scores of the other policy, NaN where there is none.
        after: [prompts, samples] scores of the policy, likewise.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        The rate, or None if no prompt has scores of both.
    """
    differences = after[:, :, None] - before[:, None, :]
    wins = np.where(np.isnan(differences), np.nan, (np.sign(differences) + 1) / 2)
    scored = wins[~np.isnan(wins).all(axis=(1, 2))]
    if not len(scored):
        return None
    values = np.nanmean(scored, axis=(1, 2))
    if len(values) < 2:
        return Estimate(float(values[0]), None)
    rate = estimate_mean(values, resamples, seed)
    return rate if rate.ci95 is None else Estimate(rate.value, (max(rate.ci95[0], 0.0), min(rate.ci95[1], 1.0)))
