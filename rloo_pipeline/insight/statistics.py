"""Accuracy, pass@k and intervals over prompts.

Prompts are the unit of resampling, not completions: the samples of one prompt are not independent.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over prompts and its 95% interval."""

    value: float
    ci95: tuple[float, float]


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
    """Mean of one value a prompt, with the percentile bootstrap's 95% interval (Efron 1979).

    The gain of one policy over another is this, called on the differences prompt by prompt (paired bootstrap).
    """
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, (mean, mean))
    from scipy.stats import bootstrap as resample

    found = resample(
        (values,), np.mean, n_resamples=resamples, method="percentile", batch=100, rng=np.random.default_rng(seed)
    )
    low, high = found.confidence_interval
    return Estimate(mean, (float(low), float(high)))
