"""Accuracy, pass@k, and what an evaluation's sampling leaves open: 95% intervals and p-values.

Prompts are what was sampled, not completions: the samples of one prompt are not independent. Everything here speaks of
these policies on other prompts of the kind, never of another training.

Shares (right answers, pass@k, truncated completions) have the interval of Korn and Graubard (1998): that of Clopper
and Pearson (1934) for as many independent answers as the spread between prompts says they are worth. Other means
(rewards, lengths, KL) have the studentised bootstrap's (Efron and Tibshirani 1993, section 12.5), nowhere narrower than
Student's. Two policies on the same prompts are compared by the sign-flip test of the mean difference (Fisher 1935,
Pitman 1937), and several comparisons are corrected together (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import comb, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
EXACT = 20
"""Of how many different patterns of signs all are looked at, as a power of 2."""
ROUNDING = 1e-12
"""Relative difference of two sums of the same numbers in another order, at most."""
BATCH = 2**20
"""Numbers drawn at a time."""


class Estimate(NamedTuple):
    """A mean over prompts and its 95% interval."""

    value: float
    ci95: tuple[float, float] | None
    """None where a mean has none: all values are equal, and nothing bounds those of other prompts."""


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


def is_share(*values: Array) -> bool:
    """Whether scores are a share of something: 0 and 1 both occur among them, and nothing else but NaN."""
    return set(np.unique(np.concatenate([found[~np.isnan(found)].ravel() for found in values]))) == {0.0, 1.0}


def estimate_share(values: Array, samples: int) -> Estimate:
    """A share of right answers, with the interval of Korn and Graubard.

    With one sample a prompt it is Clopper and Pearson's, so 0 of 200 has [0, 1.8%]. With several, p(1−p) over the
    variance of the mean says how many independent answers they are worth: at least one a prompt, at most all of them.
    That is corrected for the degrees of freedom of the variance, which are only as many as there are prompts with any
    right answer, or with any wrong one.

    Args:
        values: share of right samples of each prompt, [prompts], in [0, 1].
        samples: independent samples a prompt.
    """
    from scipy.special import betaincinv, stdtrit

    prompts, mean = len(values), float(values.mean())
    worth = float(prompts)
    if samples > 1 and 0 < mean < 1:
        every = prompts * samples
        freedom = max(1, min((values > 0).sum(), (values < 1).sum(), prompts - 1))
        variance = float(values.var(ddof=1)) / prompts if prompts > 1 else 0.0
        correction = float(stdtrit(every - 1, TAIL) / stdtrit(freedom, TAIL)) ** 2
        worth = min(max(mean * (1 - mean) * correction / variance, worth), every) if variance > 0 else worth
    right, wrong = mean * worth, (1 - mean) * worth
    low = float(betaincinv(right, wrong + 1, TAIL)) if right > 0 else 0.0
    high = float(betaincinv(right + 1, wrong, 1 - TAIL)) if wrong > 0 else 1.0
    return Estimate(mean, (low, high))


def estimate_mean(values: Array, resamples: int, seed: int) -> Estimate:
    """A mean of anything, with the wider one at each end of the studentised bootstrap's interval and Student's.

    The bootstrap follows a skewed distribution; where resamples without spread tell it nothing, as with few prompts or
    values that are nearly all the same, Student's holds.

    Args:
        values: one a prompt, [prompts].
        resamples: their number.
        seed: of the resampling.
    """
    from scipy.special import stdtrit

    prompts, found = len(values), float(values.mean())
    if np.ptp(values) <= ROUNDING * np.abs(values).max():
        return Estimate(found, None)
    error = float(values.std(ddof=1)) / sqrt(prompts)
    centred = values - found
    draw = np.random.default_rng(seed)
    drawn = [np.zeros(1)]
    for rows in _batches(resamples, prompts):
        resampled = centred[draw.integers(0, prompts, (rows, prompts))]
        means = resampled.mean(axis=1)
        errors = np.sqrt(np.maximum(np.square(resampled).mean(axis=1) - means**2, 0) / (prompts - 1))
        some = errors > 1e-6 * error
        drawn.append(means[some] / errors[some])
    low, high = np.quantile(np.concatenate(drawn), [TAIL, 1 - TAIL])
    student = -float(stdtrit(prompts - 1, TAIL))
    return Estimate(found, (found - max(float(high), student) * error, found + max(-float(low), student) * error))


def estimate_scores(scores: Array, resamples: int, seed: int) -> Estimate | None:
    """Mean over prompts of the mean of a prompt's scores; None where there is no score.

    Args:
        scores: [prompts, samples], NaN where there is none.
        resamples, seed: of the bootstrap.
    """
    known = scores[~np.isnan(scores).all(axis=1)]
    if not len(known):
        return None
    values = np.nanmean(known, axis=1)
    return estimate_share(values, scores.shape[1]) if is_share(known) else estimate_mean(values, resamples, seed)


def gain(before: Array, after: Array, resamples: int, seed: int, samples: int | None = None) -> Gain:
    """What the second gained over the first on the same prompts.

    Where the test does not reject no difference, the interval reaches to 0, so that the two never contradict each
    other in that direction.

    Args:
        before, after: one value a prompt, [prompts]; a prompt that is NaN in either is left out.
        resamples: of the bootstrap, and random signs where not all can be looked at.
        seed: of both.
        samples: a prompt, where the values are shares; None for other means.
    """
    both = ~(np.isnan(before) | np.isnan(after))
    differences = after[both] - before[both]
    differences[np.isclose(before[both], after[both], rtol=ROUNDING, atol=ROUNDING)] = 0.0
    if not len(differences):
        return Gain(None, None, None, 0)
    found = estimate_mean(differences, resamples, seed) if samples is None else share_difference(differences, samples)
    p, interval = sign_flip_p(differences, resamples, seed), found.ci95
    if interval is not None and p > 1 - LEVEL:
        interval = min(interval[0], 0.0), max(interval[1], 0.0)
    return Gain(found.value, interval, p, len(differences))


def share_difference(differences: Array, samples: int) -> Estimate:
    """Mean difference of shares on the same prompts, with its interval.

    It is the share that was won less the share that was lost, each with its interval and the correlation of the two,
    put together by Zou and Donner's rule (2008; MOVER). So 0 of 200 before and after has [−1.8%, 1.8%].

    Args:
        differences: of each prompt's two shares, [prompts], in [−1, 1].
        samples: independent samples a prompt, of either.
    """
    parts = np.maximum(differences, 0), np.maximum(-differences, 0)
    (won, around_won), (lost, around_lost) = (estimate_share(part, samples) for part in parts)
    assert around_won is not None
    assert around_lost is not None
    spread = float(parts[0].std() * parts[1].std())
    correlation = max(-won * lost / spread, -1.0) if spread > 0 else 0.0  # no prompt is in both parts

    def reach(of_won: float, of_lost: float) -> float:
        return sqrt(of_won**2 + of_lost**2 - 2 * correlation * of_won * of_lost)

    low = won - lost - reach(won - around_won[0], around_lost[1] - lost)
    high = won - lost + reach(around_won[1] - won, lost - around_lost[0])
    return Estimate(float(differences.mean()), (max(low, -1.0), min(high, 1.0)))


def sign_flip_p(differences: Array, resamples: int, seed: int) -> float:
    """Two-sided p of the mean difference: were the policies alike, each prompt's difference had either sign as likely.

    All patterns of signs are looked at where no more than 2^`EXACT` of them differ: with up to 20 differences that are
    not 0 always, and with any number of prompts that are right or wrong (McNemar's exact test then). Else that many
    random ones are, counted with the one that was seen, so that p is never 0 (Phipson and Smyth 2010).

    Args:
        differences: one a prompt, [prompts].
        resamples: random patterns, where not all are looked at.
        seed: of these.
    """
    from scipy.stats import binom

    differences = differences[differences != 0]
    seen = abs(float(differences.sum())) - 1e-9 * float(np.abs(differences).sum())
    sizes, counts = np.unique(np.round(np.abs(differences), 12), return_counts=True)
    if np.log2(counts + 1.0).sum() <= EXACT:
        sums, chances = np.zeros(1), np.ones(1)
        for size, count in zip(sizes, counts, strict=True):
            turned = np.arange(count + 1)
            sums = np.add.outer(sums, size * (count - 2 * turned)).ravel()
            chances = np.multiply.outer(chances, binom.pmf(turned, count, 0.5)).ravel()
        return min(1.0, float(chances[np.abs(sums) >= seen].sum()))
    draw = np.random.default_rng(seed)
    beyond = 0
    for rows in _batches(resamples, len(differences)):
        signs = draw.integers(0, 2, (rows, len(differences)), dtype=np.int8)
        beyond += int((np.abs((2 * signs - 1) @ differences) >= seen).sum())
    return (beyond + 1) / (resamples + 1)


def _batches(count: int, size: int) -> Iterator[int]:
    """How many rows of this size to draw at a time, until there are `count`."""
    rows = max(1, BATCH // size)
    yield from (min(rows, count - start) for start in range(0, count, rows))


def holm(ps: Mapping[str, float | None]) -> dict[str, float | None]:
    """p-values of several comparisons, each corrected for there being all of them (Holm 1979); None stays."""
    known = sorted((p, name) for name, p in ps.items() if p is not None)
    made: dict[str, float | None] = dict.fromkeys(ps)
    least = 0.0
    for place, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - place)))
        made[name] = least
    return made
