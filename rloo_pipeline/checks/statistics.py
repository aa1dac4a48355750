"""Accuracy and pass@k with their sampling uncertainty: 95% intervals and p-values.

The sampled unit is the prompt, because the completions of one prompt are not independent. Everything here describes
these policies on other prompts of the same kind. It does not predict another training run.

- Shares (right answers, pass@k, truncated completions, wins) and rewards with two values have the interval of Korn and
  Graubard (1998): the interval of Clopper and Pearson (1934) for an effective number of independent answers, from the
  spread between prompts.
- Other means (rewards, lengths, KL) have the interval of the studentised bootstrap (Efron and Tibshirani 1993,
  section 12.5), at each end at least as wide as Student's.
- Two policies on the same prompts are compared by the sign-flip test of the mean difference (Fisher 1935, Pitman 1937).
- Several comparisons are corrected together (Holm 1979).
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import comb, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
RESAMPLES = 10_000
"""Bootstrap resamples of the prompts, and random sign flips for p-values that are not computed exactly."""
EXACT = 20
"""Up to 2^`EXACT` distinct sign patterns are enumerated rather than sampled."""
ROUNDING = 1e-12
"""Largest relative difference between two sums of the same numbers in different order."""
FEWEST = 5
"""Number of scores of which two values can be all that a reward function returns."""
BATCH = 2**20
"""Number of random numbers drawn at a time."""


class Estimate(NamedTuple):
    """A mean over prompts and its 95% interval."""

    value: float
    ci95: tuple[float, float] | None
    """None if all values are equal, which says nothing about the spread on other prompts."""


class Gain(NamedTuple):
    """A mean difference over prompts; None if no prompt has both values."""

    value: float | None
    ci95: tuple[float, float] | None
    p: float | None
    """Two-sided p-value of no difference."""
    prompts: int


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right, if `right` of `samples` are.

    Chen et al. 2021, arXiv 2107.03374, equation 1: 1 − C(n−c, k)/C(n, k).
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [2**power for power in range(limit.bit_length())]


def pass_at_ks(right: NDArray[np.bool_]) -> dict[int, Array]:
    """pass@k of each prompt for k = 1, 2, 4, … up to the number of samples.

    Args:
        right: [prompts, samples].

    Returns:
        k → [prompts].
    """
    samples, counts = right.shape[1], right.sum(axis=1)
    return {k: np.array([pass_at_k(samples, int(count), k) for count in counts]) for k in powers_of_two(samples)}


def informative(rewards: Array) -> float:
    """Share of groups with at least two different rewards, given [prompts, samples] with NaN for none. Rewards that
    differ only by rounding count as equal.
    """
    scored = [group[~np.isnan(group)] for group in rewards]
    return float(np.mean([len(group) > 0 and np.ptp(group) > ROUNDING * np.abs(group).max() for group in scored]))


def reaches(values: Array, least: float) -> NDArray[np.bool_]:
    """True for values of at least `least`, or below it by rounding alone, as ten times 0.1 is in a sum. NaN is not."""
    return values >= least - ROUNDING * abs(least)


def two_values(*values: Array) -> tuple[float, float] | None:
    """The two values that scores have, lower first; None if they have fewer or more. NaN does not count. Values that
    differ only by rounding are one.

    Fewer than `FEWEST` scores, such as two lengths, do not show that there are no others, unless they are 0 and 1.
    """
    scored = np.concatenate([scores[~np.isnan(scores)].ravel() for scores in values])
    found = np.unique(scored)
    if len(scored) < FEWEST and {*found} != {0.0, 1.0}:
        return None
    found = found[np.diff(found, prepend=-np.inf) > ROUNDING * np.abs(found).max(initial=0.0)]
    return (float(found[0]), float(found[1])) if len(found) == 2 else None


def estimate_share(values: Array, samples: float) -> Estimate:
    """A share of right answers, with the interval of Korn and Graubard.

    With one sample per prompt it is the interval of Clopper and Pearson, so 0 of 200 has [0, 1.8%]. With several, the
    effective number of independent answers is p(1−p) over the variance of the mean, at least one per prompt and at most
    all samples; if all prompts have the same share, one per prompt. It is corrected for the degrees of freedom of the
    variance, the smaller of the effective numbers of prompts (Kish 1965) that the right answers and the wrong answers
    come from.

    Args:
        values: share of right samples of each prompt, [prompts], in [0, 1].
        samples: independent samples per prompt; their harmonic mean if prompts differ in it.
    """
    from scipy.special import stdtrit

    prompts, mean = len(values), float(values.mean())
    effective = float(prompts)
    if samples > 1 and np.ptp(values) > ROUNDING:
        freedom = max(1, min(effective_count(values), effective_count(1 - values), prompts - 1))
        variance = float(values.var(ddof=1)) / prompts
        correction = float(stdtrit(prompts * samples - 1, TAIL) / stdtrit(freedom, TAIL)) ** 2
        effective = min(max(mean * (1 - mean) * correction / variance, effective), prompts * samples)
    return Estimate(mean, share_interval(mean, effective))


def effective_count(weights: Array) -> float:
    """Kish's effective number of values with these weights: (Σ w)² / Σ w²."""
    return float(weights.sum() ** 2 / np.square(weights).sum())


def share_interval(share: float, answers: float) -> tuple[float, float]:
    """The Clopper-Pearson 95% interval of a share of independent answers, whose numbers need not be whole."""
    from scipy.special import betaincinv

    right, wrong = share * answers, (1 - share) * answers
    low = float(betaincinv(right, wrong + 1, TAIL)) if right > 0 else 0.0
    high = float(betaincinv(right + 1, wrong, 1 - TAIL)) if wrong > 0 else 1.0
    return low, high


def estimate_mean(values: Array, resamples: int, seed: int) -> Estimate:
    """A mean, with the wider of the studentised bootstrap's interval and Student's at each end.

    The bootstrap adapts to skewed distributions. Resamples without spread tell it nothing; with few prompts or nearly
    equal values, Student's interval is the wider one.

    Args:
        values: one per prompt, [prompts].
        resamples: number of bootstrap resamples.
        seed: seed of the resampling.
    """
    from scipy.special import stdtrit

    prompts, mean = len(values), float(values.mean())
    if np.ptp(values) <= ROUNDING * np.abs(values).max():
        return Estimate(mean, None)
    error = float(values.std(ddof=1)) / sqrt(prompts)
    centred = values - mean
    draw = np.random.default_rng(seed)
    statistics = [np.zeros(1)]
    for rows in _batches(resamples, prompts):
        resampled = centred[draw.integers(0, prompts, (rows, prompts))]
        means = resampled.mean(axis=1)
        errors = np.sqrt(np.maximum(np.square(resampled).mean(axis=1) - means**2, 0) / (prompts - 1))
        spread = errors > 1e-6 * error
        statistics.append(means[spread] / errors[spread])
    low, high = np.quantile(np.concatenate(statistics), [TAIL, 1 - TAIL])
    student = -float(stdtrit(prompts - 1, TAIL))
    return Estimate(mean, (mean - max(float(high), student) * error, mean + max(-float(low), student) * error))


def estimate_scores(scores: Array, resamples: int, seed: int) -> Estimate | None:
    """Mean over prompts of a prompt's mean score; None if there are no scores.

    Args:
        scores: [prompts, samples], NaN for none.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.
    """
    values = prompt_means(scores)
    if not len(values):
        return None
    pair = two_values(scores)
    if pair is None:
        return estimate_mean(values, resamples, seed)
    low, width = pair[0], pair[1] - pair[0]
    ends = estimate_share((values - low) / width, samples_each(scores)).ci95
    assert ends is not None
    return Estimate(float(values.mean()), (low + width * ends[0], low + width * ends[1]))


def samples_each(*scores: Array) -> float:
    """Harmonic mean of the numbers of scores of the prompts that have any in each table; 1 without such a prompt.

    A mean over prompts that are alike has the variance that this number of scores of each prompt would give it.

    Args:
        scores: [prompts, samples], NaN for none.
    """
    counts = np.array([(~np.isnan(table)).sum(axis=1) for table in scores])
    counts = counts[:, counts.all(axis=0)]
    return float(1 / np.mean(1 / counts)) if counts.size else 1.0


def prompt_means(values: Array) -> Array:
    """Mean over the samples of each prompt that has any, given [prompts, samples] with NaN for none."""
    means: Array = np.nanmean(values[~np.isnan(values).all(axis=1)], axis=1)
    return means


def gain(
    before: Array, after: Array, resamples: int, seed: int, samples: float | None = None, width: float = 1.0
) -> Gain:
    """Mean difference of two policies on the same prompts.

    If the test does not reject the hypothesis of no difference, the interval is extended to include 0, so that test and
    interval do not contradict each other in that direction.

    Args:
        before: one value per prompt, [prompts]; a prompt that is NaN in either is left out.
        after: the same for the other policy.
        resamples: number of bootstrap resamples, and of random sign patterns if they cannot all be enumerated.
        seed: seed of both.
        samples: samples per prompt if the scores have two values; None for other means.
        width: distance of these two values; 1 for shares.
    """
    both = ~(np.isnan(before) | np.isnan(after))
    differences = after[both] - before[both]
    differences[np.isclose(before[both], after[both], rtol=ROUNDING, atol=ROUNDING)] = 0.0
    if not len(differences):
        return Gain(None, None, None, 0)
    value, interval = (
        estimate_mean(differences, resamples, seed)
        if samples is None
        else share_difference(differences, samples, width)
    )
    if abs(value) <= ROUNDING * np.abs(differences).max():
        value = 0.0
    p = sign_flip_p(differences, resamples, seed)
    if interval is not None and p > 1 - LEVEL:
        interval = min(interval[0], 0.0), max(interval[1], 0.0)
    return Gain(value, interval, p, len(differences))


def share_difference(differences: Array, samples: float, width: float = 1.0) -> Estimate:
    """Mean difference of shares on the same prompts, with its interval.

    It is the share won less the share lost. The intervals of both and their correlation are combined by the rule of Zou
    and Donner (2008, MOVER). So 0 of 200 before and after has [−1.8%, 1.8%].

    Args:
        differences: between the two shares of each prompt, [prompts], times `width`.
        samples: independent samples per prompt of each policy.
        width: distance of the two values that scores have.
    """
    parts = np.maximum(differences / width, 0), np.maximum(-differences / width, 0)
    (won, won_ci95), (lost, lost_ci95) = (estimate_share(part, samples) for part in parts)
    assert won_ci95 is not None
    assert lost_ci95 is not None
    spread = float(parts[0].std() * parts[1].std())
    correlation = max(-won * lost / spread, -1.0) if spread > 0 else 0.0  # no prompt is in both parts

    def margin(of_won: float, of_lost: float) -> float:
        return sqrt(of_won**2 + of_lost**2 - 2 * correlation * of_won * of_lost)

    low = won - lost - margin(won - won_ci95[0], lost_ci95[1] - lost)
    high = won - lost + margin(won_ci95[1] - won, lost - lost_ci95[0])
    return Estimate(float(differences.mean()), (width * max(low, -1.0), width * min(high, 1.0)))


def sign_flip_p(differences: Array, resamples: int, seed: int) -> float:
    """Two-sided p-value of the mean difference by the sign-flip test.

    If the policies were equally good, each prompt's difference would have either sign with the same probability. Up to
    2^`EXACT` distinct patterns of signs are enumerated: always with up to 20 nonzero differences, and with any number
    of prompts that are just right or wrong (which is McNemar's exact test). Otherwise random patterns are drawn and
    counted together with the observed one, so that p is never 0 (Phipson and Smyth 2010).

    Args:
        differences: one per prompt, [prompts].
        resamples: number of random patterns.
        seed: seed of the random patterns.
    """
    differences = differences[differences != 0]
    differences = differences / np.abs(differences).max(initial=0.0)  # rounding below is to absolute digits
    observed = abs(float(differences.sum())) - 1e-9 * float(np.abs(differences).sum())
    sizes, counts = np.unique(np.round(np.abs(differences), 12), return_counts=True)
    if np.log2(counts + 1.0).sum() <= EXACT:
        sums, probabilities = np.zeros(1), np.ones(1)
        for size, count in zip(sizes, counts, strict=True):
            flips = np.arange(count + 1)
            sums = np.add.outer(sums, size * (count - 2 * flips)).ravel()
            probabilities = np.multiply.outer(probabilities, _chances_of_heads(int(count))).ravel()
        return min(1.0, float(probabilities[np.abs(sums) >= observed].sum()))
    draw = np.random.default_rng(seed)
    beyond = 0
    for rows in _batches(resamples, len(differences)):
        signs = draw.integers(0, 2, (rows, len(differences)), dtype=np.int8)
        beyond += int((np.abs((2 * signs - 1) @ differences) >= observed).sum())
    return (beyond + 1) / (resamples + 1)


def _chances_of_heads(tosses: int) -> Array:
    """Probabilities of 0 to `tosses` heads of a fair coin, without the half second that scipy.stats takes to import."""
    ways = accumulate(range(tosses), lambda ways, heads: ways * (tosses - heads) // (heads + 1), initial=1)
    sequences = 2**tosses
    return np.array([count / sequences for count in ways])


def _batches(count: int, size: int) -> Iterator[int]:
    """Splits `count` rows of this size into batches of at most `BATCH` numbers; yields the rows of each."""
    rows = max(1, BATCH // size)
    yield from (min(rows, count - start) for start in range(0, count, rows))


def holm(ps: Mapping[str, float | None]) -> dict[str, float | None]:
    """Corrects p-values for the number of comparisons (Holm 1979); None stays None."""
    ascending = sorted((p, name) for name, p in ps.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(ps)
    smallest = 0.0
    for rank, (p, name) in enumerate(ascending):
        smallest = max(smallest, min(1.0, p * (len(ascending) - rank)))
        corrected[name] = smallest
    return corrected
