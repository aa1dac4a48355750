"""The expected share of mixed groups (some completions right, some wrong) at another K.

The chance p that a completion is right differs from prompt to prompt. With p ~ Beta(a, b), the number of right
completions among K has a beta-binomial distribution. A group is all right with chance B(a+K, b)/B(a, b) and all wrong
with chance B(a, b+K)/B(a, b). Maximum likelihood fits a and b to the probe. The empirical share c/K of each prompt
cannot replace p: it would treat every prompt as hopeless that was never solved in a few tries, and could name no K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LARGEST = 1024
"""Largest K that is considered."""


class Mixing(NamedTuple):
    """Parameters of the Beta distribution of p."""

    a: float
    b: float

    def mixed(self, samples: int) -> float:
        """Chance that a group of `samples` is neither all right nor all wrong."""
        import numpy as np
        from scipy.special import betaln

        whole = betaln(self.a, self.b)
        right = np.exp(betaln(self.a + samples, self.b) - whole)
        wrong = np.exp(betaln(self.a, self.b + samples) - whole)
        return float(max(0.0, 1 - right - wrong))

    def samples_for(self, share: float) -> int | None:
        """The smallest K at which this share of groups is mixed; None if no K up to `LARGEST` is enough."""
        return next((k for k in range(2, LARGEST + 1) if self.mixed(k) >= share), None)


def fit(right: Sequence[int] | NDArray[np.int64], samples: int) -> Mixing | None:
    """Fits the distribution by maximum likelihood.

    Args:
        right: number of right completions of each prompt.
        samples: completions per prompt.

    Returns:
        None if all completions of all prompts are right, or all wrong: no distribution is likelier than any other.
    """
    import numpy as np
    from scipy.optimize import minimize
    from scipy.stats import betabinom

    counts = np.asarray(right)
    if counts.sum() in (0, samples * len(counts)):
        return None
    values, times = np.unique(counts, return_counts=True)

    def loss(log_ab: NDArray[np.float64]) -> float:
        return -float((times * betabinom.logpmf(values, samples, *np.exp(log_ab))).sum())

    mean = counts.mean() / samples
    start = np.log([max(mean, 0.01), max(1 - mean, 0.01)])
    optimum = minimize(loss, start, method="L-BFGS-B", bounds=[(-7, 7), (-7, 7)])
    return Mixing(*map(float, np.exp(optimum.x)))
