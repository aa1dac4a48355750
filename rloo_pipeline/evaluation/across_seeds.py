"""Accuracy over several trainings: what arms of an experiment show about training, not about one policy.

The values of an arm are a table [seeds, prompts]: each seed is one training, and all are evaluated on the same prompts.
Both are samples: of trainings, and of prompts of the kind.

- Intervals are of the hierarchical bootstrap, which draws seeds and prompts with replacement. Agarwal et al. 2021
  (arXiv 2108.13264) draw runs within tasks; here prompts are crossed with seeds, as in Owen 2007 (arXiv 0712.1111).
  Few seeds give too narrow a bootstrap, so the ends are moved away from the estimate by the ratio of Student's
  quantile to the normal one (Hesterberg 2015, arXiv 1411.5279, section 5.2), with Satterthwaite's (1946) degrees of
  freedom.
- Arms are compared in pairs of the same seed and prompt; the p-value is of Student's t with the same freedom.
- The chance of improvement is that of a training of one arm to be better than one of the other (Agarwal et al. 2021).
  If all trainings seen are, all of every resample are too, so the bootstrap's interval is extended to that of Newcombe
  (2006, Statistics in Medicine 25, 559-573, method 5), with Student's quantile for few seeds.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rloo_pipeline.evaluation.statistics import TAIL, Array, Estimate

FEWEST = 3
"""Seeds from which something is said about training."""
POWER = 0.8
MOST = 1000
"""Seeds up to which the number that a test needs is searched."""


class Summary(NamedTuple):
    """An arm over its seeds; intervals are None with fewer than `FEWEST` seeds."""

    mean: Estimate
    iqm: Estimate
    """Interquartile mean over seeds: a quarter of the seeds at either end is left out."""


class Comparison(NamedTuple):
    """An arm less another one, over the seeds of both; None with fewer than `FEWEST` seeds."""

    value: float
    ci95: tuple[float, float] | None
    p: float | None
    """Two-sided p-value of no difference."""
    improvement: float
    """Chance that a training of the first arm is better than one of the second; ties count half."""
    improvement_ci95: tuple[float, float] | None
    seeds_needed: int | None
    """Seeds for 80% power at this difference; None where that is more than `MOST` or cannot be told."""


def summarize_arm(values: Array, resamples: int, seed: int) -> Summary:
    """An arm's mean and interquartile mean, with 95% intervals.

    Args:
        values: shares of right answers, [seeds, prompts].
        resamples: number of bootstrap resamples.
        seed: of the bootstrap.
    """
    from scipy.stats import trim_mean

    by_seed = values.mean(axis=1)
    mean, iqm = float(by_seed.mean()), float(trim_mean(by_seed, 0.25))
    if len(values) < FEWEST:
        return Summary(Estimate(mean, None), Estimate(iqm, None))
    drawn = _seed_means(values, resamples, seed)
    factor = _widening(values)
    means, iqms = drawn.mean(axis=1), trim_mean(drawn, 0.25, axis=1)
    return Summary(Estimate(mean, _of_share(mean, means, factor)), Estimate(iqm, _of_share(iqm, iqms, factor)))


def compare_arms(values: Array, others: Array, resamples: int, seed: int) -> Comparison:
    """An arm less another one.

    Args:
        values: of the arm, [seeds, prompts].
        others: of the other arm, for the same seeds and prompts.
        resamples: number of bootstrap resamples.
        seed: of the bootstrap.
    """
    from scipy.special import stdtr

    differences = values - others
    value = float(differences.mean())
    improvement = _improvement(values.mean(axis=1)[None], others.mean(axis=1)[None])[0]
    if len(values) < FEWEST:
        return Comparison(value, None, None, improvement, None, None)
    drawn, drawn_others = (_seed_means(table, resamples, seed) for table in (values, others))
    interval = _interval(value, drawn.mean(axis=1) - drawn_others.mean(axis=1), _widening(differences))
    low, high = np.quantile(_improvement(drawn, drawn_others), [TAIL, 1 - TAIL])
    few = chance_ci95(improvement, len(values))
    error, freedom = _standard_error(differences)
    p = 2 * float(stdtr(freedom, -abs(value) / error)) if error > 0 else float(value == 0)
    needed = seeds_needed(differences.mean(axis=1))
    improvement_ci95 = min(float(low), few[0]), max(float(high), few[1])
    return Comparison(value, interval, p, improvement, improvement_ci95, needed)


def chance_ci95(chance: float, seeds: int) -> tuple[float, float]:
    """Newcombe's 95% interval of the chance that a training of one arm is better than one of another.

    It holds the chances that are at most a quantile of standard errors away from the one that was seen, by Hanley and
    McNeil's formula at that chance. The quantile is Student's with the freedom of two samples.

    Args:
        chance: share of pairs in which it is, ties counted half.
        seeds: trainings of either arm.
    """
    from scipy.optimize import brentq
    from scipy.special import stdtrit

    quantile = float(stdtrit(2 * (seeds - 1), TAIL))

    def beyond(true: float, seen: float) -> float:
        pairs = 1 + (seeds - 1) * ((1 - true) / (2 - true) + true / (1 + true))
        return (seen - true) ** 2 - quantile**2 * true * (1 - true) * pairs / seeds**2

    def low(seen: float) -> float:
        return float(brentq(beyond, 0.0, seen * (1 - 1e-9), args=(seen,))) if seen > 0 else 0.0

    return low(chance), 1 - low(1 - chance)


def seeds_needed(differences: Array) -> int | None:
    """Seeds for 80% power of the two-sided paired t-test at 5%, if the true difference and its spread were these.

    Args:
        differences: one per seed, [seeds].

    Returns:
        The number; None where it is above `MOST`, or where there is no difference or no spread to tell it from.
    """
    from scipy.stats import nct, t

    spread = float(differences.std(ddof=1)) if len(differences) > 1 else 0.0
    effect = abs(float(differences.mean())) / spread if spread > 0 else 0.0
    if not effect:
        return None
    counts = np.arange(2, MOST + 1)
    limits = t.ppf(1 - TAIL, counts - 1)
    power = nct.sf(limits, counts - 1, np.minimum(effect * np.sqrt(counts), 30.0))
    enough = counts[power >= POWER]
    return int(enough[0]) if len(enough) else None


def _seed_means(values: Array, resamples: int, seed: int) -> Array:
    """Means over drawn prompts of drawn seeds, [resamples, seeds]; the same draws for every table of this shape."""
    weights, chosen = _draws(*values.shape, resamples, seed)
    means: Array = np.take_along_axis(weights @ values.T, chosen, axis=1)
    return means


@lru_cache(maxsize=1)  # as large as resamples × prompts, and the same for most pairs of arms
def _draws(seeds: int, prompts: int, resamples: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Weights of the drawn prompts, [resamples, prompts], and the drawn seeds, [resamples, seeds]."""
    draw = np.random.default_rng(seed)
    weights: Array = draw.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples) / prompts
    return weights, draw.integers(0, seeds, (resamples, seeds))


def _standard_error(values: Array) -> tuple[float, float]:
    """Standard error of the mean over seeds and prompts, and its degrees of freedom (Satterthwaite 1946)."""
    parts = [
        (float(means.var(ddof=1)) / len(means) if len(means) > 1 else 0.0, max(len(means) - 1, 1))
        for means in (values.mean(axis=1), values.mean(axis=0))
    ]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return 0.0, 1.0
    return sqrt(variance), variance**2 / sum(part**2 / freedom for part, freedom in parts)


def _widening(values: Array) -> float:
    """What the distance of a bootstrap interval's ends from the estimate is multiplied with."""
    from scipy.special import stdtrit

    error, freedom = _standard_error(values)
    seeds, by_seed = len(values), float(values.mean(axis=1).var(ddof=1)) / len(values)
    if error == 0:
        return 1.0
    drawn = error**2 - by_seed / seeds  # a bootstrap's variance over n seeds is (n − 1)/n of the unbiased one
    return float(stdtrit(freedom, TAIL) / stdtrit(1e9, TAIL)) * error / sqrt(drawn)


def _interval(value: float, drawn: Array, factor: float) -> tuple[float, float]:
    low, high = np.quantile(drawn, [TAIL, 1 - TAIL])
    return value + factor * min(float(low) - value, 0.0), value + factor * max(float(high) - value, 0.0)


def _of_share(value: float, drawn: Array, factor: float) -> tuple[float, float]:
    """As `_interval`, without what lies outside of 0 to 1, where the true share cannot be."""
    low, high = _interval(value, drawn, factor)
    return max(low, 0.0), min(high, 1.0)


def _improvement(values: Array, others: Array) -> Array:
    """Share of pairs of a training of either arm in which the first is better, [rows]; both [rows, seeds]."""
    pairs = values[:, :, None] - others[:, None, :]
    shares: Array = ((pairs > 1e-12) + 0.5 * (np.abs(pairs) <= 1e-12)).mean(axis=(1, 2))
    return shares
