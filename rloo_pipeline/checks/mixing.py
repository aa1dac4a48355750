"""How many groups would be mixed at another K: some right, some wrong, which is what RLOO learns from.

The chance p that a completion is right differs from prompt to prompt. With p ~ Beta(a, b), the right ones among K have
a beta-binomial distribution, and a group is all right with chance B(a+K, b)/B(a, b), all wrong with B(a, b+K)/B(a, b).
a and b are fitted to the trial by maximum likelihood. The empirical share c/K of each prompt in place of p would call
every prompt hopeless that was never solved in a few tries, and so name no K at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGEST = 1024
"""K that is looked up to."""


class Mixing(NamedTuple):
    """The two parameters of the Beta distribution."""

    a: float
    b: float

    def mixed(self, samples: int) -> float:
        """Chance that a group of `samples` is neither all right nor all wrong."""
        from scipy.special import betaln

        whole = betaln(self.a, self.b)
        right = np.exp(betaln(self.a + samples, self.b) - whole)
        wrong = np.exp(betaln(self.a, self.b + samples) - whole)
        return float(max(0.0, 1 - right - wrong))

    def samples_for(self, share: float) -> int | None:
        """The smallest K at which this share of groups is mixed; None where none up to `LARGEST` is enough."""
        return next((k for k in range(2, LARGEST + 1) if self.mixed(k) >= share), None)


def fit(right: Sequence[int] | NDArray[np.int64], samples: int) -> Mixing | None:
    """Maximum likelihood.

    Args:
        right: right completions of each prompt.
        samples: completions a prompt.

    Returns:
        None where all completions of all prompts are right, or all wrong: no distribution is likelier than any other.
    """
    from scipy.optimize import minimize
    from scipy.stats import betabinom

    counts = np.asarray(right)
    if counts.sum() in (0, samples * len(counts)):
        return None
    values, times = np.unique(counts, return_counts=True)

    def loss(logs: NDArray[np.float64]) -> float:
        return -float((times * betabinom.logpmf(values, samples, *np.exp(logs))).sum())

    mean = counts.mean() / samples
    start = np.log([max(mean, 0.01), max(1 - mean, 0.01)])
    found = minimize(loss, start, method="L-BFGS-B", bounds=[(-7, 7), (-7, 7)])
    return Mixing(*map(float, np.exp(found.x)))
