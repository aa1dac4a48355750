"""Accuracy over several training runs: compares arms of an experiment, not single policies.

The values of an arm are a table [seeds, prompts]: each seed is one training run, and all are evaluated on the same
prompts. Seeds are a sample of training runs, and prompts a sample of prompts of their kind.

- The squared margin of a mean is the sum of the squared margins of seeds and of prompts, each with its own Student's
  quantile. Banerjee (1960, Sankhyā 22, 357-358) proved that the interval of a sum of normal means is then never too
  narrow.
- A share has the interval of Clopper and Pearson (1934) for the number of independent answers that would have this
  margin, as in Korn and Graubard (1998, Survey Methodology 24, 193-201). It stays between 0 and 1, and does not shrink
  to nothing at either end.
- Arms are compared in pairs of the same seed and prompt. The margin of a difference is at least that of the share won
  less the share lost (Zou and Donner 2008, MOVER), which is not 0 where all seeds agree.
- p is the larger one of two: that of the test that inverts the margin, and that of the sign-flip test over seeds
  (Fisher 1935), which assumes no distribution. With n seeds it is never below 2 / 2^n.
- The interquartile mean has the standard error of Tukey and McLaughlin (1963, Sankhyā A 25, 331-352).
- The chance of improvement is the probability that a training run of one arm beats one of the other on these prompts
  (Agarwal et al. 2021, arXiv 2108.13264), with the interval of Newcombe (2006, Statistics in Medicine 25, 559-573,
  method 5) and Student's quantile for few seeds. On other prompts the chance can lie outside of it. Only pairs of
  different seeds count, since runs with the same seed share their warm start: with those pairs, three seeds showed 65%
  on average where the truth was 58%.

tools/coverage_over_seeds.py measures how often the intervals contain the truth (docs/generated/experiments.md).
"""

from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit

from rloo_pipeline.checks.statistics import ROUNDING, TAIL, Array, Estimate, share_interval, sign_flip_p

FEWEST = 3
"""Minimum number of seeds to say something about training."""
FEWEST_FOR_IQM = 5
"""Minimum number of seeds of which an interquartile mean drops the best and the worst and keeps at least three."""


class Summary(NamedTuple):
    """An arm over its seeds; intervals are None with fewer than `FEWEST` seeds."""

    mean: Estimate
    iqm: Estimate | None
    """Mean without the best and the worst quarter of the seeds; None with fewer than `FEWEST_FOR_IQM` seeds."""


class Comparison(NamedTuple):
    """The difference between two arms, over their seeds; all but `value` is None with fewer than `FEWEST` seeds."""

    value: float
    ci95: tuple[float, float] | None
    p: float | None
    """Two-sided p-value of no difference."""
    improvement: float | None
    """Chance, on these prompts, that a run of the first arm is better than one of the second with another seed; ties
    count half.
    """
    improvement_ci95: tuple[float, float] | None


class _Variance(NamedTuple):
    """Variance of a mean over seeds and prompts, by source, with the number of values behind each estimate."""

    of_seeds: float
    seeds: int
    of_prompts: float
    prompts: int

    def margin(self, tail: float = TAIL) -> float:
        """Banerjee's margin: half the width of the interval that excludes `tail` at either end."""
        seeds, prompts = (float(stdtrit(max(count - 1, 1), tail)) for count in (self.seeds, self.prompts))
        return sqrt(seeds**2 * self.of_seeds + prompts**2 * self.of_prompts)


def summarize_arm(values: Array) -> Summary:
    """An arm's mean and interquartile mean, with 95% intervals.

    Args:
        values: shares of right answers, [seeds, prompts].
    """
    mean = float(values.mean())
    if len(values) < FEWEST:
        return Summary(Estimate(mean, None), None)
    iqm = _interquartile_mean(values) if len(values) >= FEWEST_FOR_IQM else None
    return Summary(Estimate(mean, _share_ci95(mean, _variance(values))), iqm)


def compare_arms(values: Array, others: Array, resamples: int, seed: int) -> Comparison:
    """The difference of one arm minus another.

    Args:
        values: the arm's shares of right answers, [seeds, prompts].
        others: the other arm's shares, for the same seeds and prompts.
        resamples: number of random sign patterns in the sign-flip test; used with more than 20 seeds.
        seed: seed of these patterns.
    """
    differences = values - others
    value = float(differences.mean())
    if len(values) < FEWEST:
        return Comparison(value, None, None, None, None)
    improvement = _improvement(values.mean(axis=1), others.mean(axis=1))
    of_seeds = differences.mean(axis=1)
    of_seeds[np.abs(of_seeds) <= ROUNDING] = 0.0  # all of them may have the same rounding
    by_seed = sign_flip_p(of_seeds, resamples, seed)
    p = max(_p_of_margin(value, _variance(differences)), by_seed, smallest_p(len(values)))
    return Comparison(value, _difference_ci95(differences), p, improvement, chance_ci95(improvement, len(values)))


def smallest_p(seeds: int) -> float:
    """The smallest p-value that this number of seeds allows: all differences have the same sign."""
    return float(2.0 ** (1 - seeds))


def chance_ci95(chance: float, seeds: int) -> tuple[float, float]:
    """Newcombe's 95% interval of the chance that a training run of one arm is better than one of the other.

    It contains the chances that are at most a quantile of standard errors away from the observed one, by Hanley and
    McNeil's formula at that chance. The quantile is Student's, with the degrees of freedom of two samples.

    Args:
        chance: share of pairs in which it is better; ties count half.
        seeds: number of training runs of either arm.
    """
    quantile = float(stdtrit(2 * (seeds - 1), TAIL))

    def beyond(true: float, seen: float) -> float:
        pairs = 1 + (seeds - 1) * ((1 - true) / (2 - true) + true / (1 + true))
        return (seen - true) ** 2 - quantile**2 * true * (1 - true) * pairs / seeds**2

    def low(seen: float) -> float:
        return float(brentq(beyond, 0.0, seen * (1 - 1e-9), args=(seen,))) if seen > 0 else 0.0

    return low(chance), 1 - low(1 - chance)


def _variance(values: Array) -> _Variance:
    """The variance of the mean of a table [seeds, prompts]. Variation in both directions counts twice, so intervals are
    rather too wide than too narrow.
    """
    seeds, prompts = values.shape
    of_prompts = float(values.mean(axis=0).var(ddof=1)) / prompts if prompts > 1 else 0.0
    return _Variance(float(values.mean(axis=1).var(ddof=1)) / seeds, seeds, of_prompts, prompts)


def _share_ci95(share: float, variance: _Variance) -> tuple[float, float]:
    """Korn and Graubard's interval of a share.

    If the variance is 0, there is one independent answer per prompt, corrected for the degrees of freedom of the seeds:
    as if answers to a prompt were always equal, and seeds differed as much as the prompts could show.
    """
    normal = float(stdtrit(np.inf, TAIL))
    margin = variance.margin()
    if margin > ROUNDING:
        answers = normal**2 * share * (1 - share) / margin**2
    else:
        answers = variance.prompts * (normal / float(stdtrit(variance.seeds - 1, TAIL))) ** 2
    return share_interval(share, answers)


def _interquartile_mean(values: Array) -> Estimate:
    """The mean over the seeds between the quartiles, and its interval."""
    seeds, cut = len(values), len(values) // 4
    kept = values[np.argsort(values.mean(axis=1), kind="stable")[cut : seeds - cut]]
    by_seed, mean, variance = kept.mean(axis=1), float(kept.mean()), _variance(kept)
    winsorized = np.concatenate([np.repeat(by_seed[[0, -1]], cut), by_seed])
    of_seeds = float(winsorized.var(ddof=0)) * seeds / (len(kept) * (len(kept) - 1))
    return Estimate(mean, _share_ci95(mean, variance._replace(of_seeds=of_seeds)))


def _difference_ci95(differences: Array) -> tuple[float, float]:
    """The interval of a mean difference of shares, within −1 to 1."""
    margin = _variance(differences).margin()
    parts = np.maximum(differences, 0), np.maximum(-differences, 0)
    won, lost = (float(part.mean()) for part in parts)
    of_won, of_lost = (_share_ci95(part.mean(), _variance(part)) for part in parts)
    low = max(margin, sqrt((won - of_won[0]) ** 2 + (of_lost[1] - lost) ** 2))
    high = max(margin, sqrt((of_won[1] - won) ** 2 + (lost - of_lost[0]) ** 2))
    return max(won - lost - low, -1.0), min(won - lost + high, 1.0)


def _p_of_margin(value: float, variance: _Variance) -> float:
    """The p-value at which Banerjee's interval just touches 0."""
    smallest = 1e-12

    def beyond(p: float) -> float:
        return variance.margin(p / 2) - abs(value)

    return float(brentq(beyond, smallest, 1.0)) if beyond(smallest) > 0 > beyond(1.0) else float(value == 0)


def _improvement(levels: Array, others: Array) -> float:
    """Share of pairs of training runs with different seeds, one from each arm, in which the first is better; arguments
    are [seeds].
    """
    pairs = np.subtract.outer(levels, others)[~np.eye(len(levels), dtype=bool)]
    return float(((pairs > 1e-12) + 0.5 * (np.abs(pairs) <= 1e-12)).mean())
