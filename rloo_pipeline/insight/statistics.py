"""Accuracy, pass@k and intervals over prompts.

Prompts are the unit of resampling, not completions: the samples of one prompt are not independent.
"""

from __future__ import annotations

from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over prompts and its 95% interval."""

    value: float
    ci95: tuple[float, float]


class Gain(NamedTuple):
    """A mean difference over prompts; None where no prompt has both values."""

    value: float | None
    ci95: tuple[float, float] | None
    p: float | None
    """Two-sided, against no difference."""
    prompts: int


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from `right` of `samples` (Chen et al. 2021,
    arXiv 2107.03374, equation 1): 1 − C(n−c, k)/C(n, k).
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def pass_at_ks(right: NDArray[np.bool_]) -> dict[int, Array]:
    """pass@k of each prompt for k = 1, 2, 4, … up to the number of samples.

    Args:
        right: [prompts, samples].

    Returns:
        k → [prompts].
    """
    samples = right.shape[1]
    ks = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    counts = right.sum(axis=1)
    return {k: np.array([pass_at_k(samples, int(count), k) for count in counts]) for k in ks}


def bootstrap(values: Array, resamples: int, seed: int) -> Estimate:
    """Mean of one value a prompt, with the percentile bootstrap's 95% interval (Efron 1979)."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, (mean, mean))
    low, high = _resampled(values, resamples, seed).confidence_interval
    return Estimate(mean, (float(low), float(high)))


def gain(before: Array, after: Array, resamples: int, seed: int) -> Gain:
    """What the second gained over the first on the same prompts: the bootstrap of the differences, prompt by prompt.

    The p-value is that of the same resamples: twice the share of their means that lie on the other side of 0 (of
    those at 0, half), with 1 added above and below so that it is never 0 (Davison and Hinkley 1997, section 4.4). It is
    under 0.05 where the interval leaves 0 out, but for the grain of the resamples.

    Args:
        before, after: one value a prompt, [prompts]; a prompt that is NaN in either is left out.
        resamples: their number.
        seed: of the resampling.
    """
    both = ~(np.isnan(before) | np.isnan(after))
    differences = after[both] - before[both]
    if not len(differences):
        return Gain(None, None, None, 0)
    mean = float(differences.mean())
    if len(differences) < 2:
        return Gain(mean, (mean, mean), 1.0, 1)
    found = _resampled(differences, resamples, seed)
    low, high = found.confidence_interval
    means = found.bootstrap_distribution
    ties = float((means == 0).sum()) / 2
    beyond = min(float((means < 0).sum()), float((means > 0).sum())) + ties
    p = min(1.0, 2 * (beyond + 1) / (len(means) + 1))
    return Gain(mean, (float(low), float(high)), p, len(differences))


def _resampled(values: Array, resamples: int, seed: int) -> Any:
    """scipy's bootstrap of the mean."""
    from scipy.stats import bootstrap as resample

    return resample(
        (values,), np.mean, n_resamples=resamples, method="percentile", batch=100, rng=np.random.default_rng(seed)
    )
