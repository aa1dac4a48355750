"""Checks of the groups: RLOO learns nothing from a group whose rewards are all equal.

A mixed group has right and wrong completions. The chance p that a completion is right differs from prompt to prompt.
With p ~ Beta(a, b), the number of right completions among K has a beta-binomial distribution. A group is all right with
chance B(a+K, b)/B(a, b) and all wrong with chance B(a, b+K)/B(a, b). Maximum likelihood fits a and b to the probe. The
empirical share c/K of each prompt cannot replace p: it would treat every prompt that was never solved in a
few tries as hopeless, and could not suggest a K.

Up to the probe's K, the fit is within a point of an unbiased estimate. Beyond it, it does not know that prompts can be
always or never solved: if a quarter are never solved, it suggests a K of about 50 from a probe of 8, although no K
would do; and at four times the probe's K, it takes 2 to 7 points too many groups for mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline.checks.registry import CheckResult, check

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rloo_pipeline.checks.statistics import Array, Flags

LARGEST = 1024
"""Largest K considered."""
WANTED = 0.8
"""Share of mixed groups for which the check `mixed` suggests a K."""


@check(bad="above", warn=0.5)
def all_right(right: Flags) -> CheckResult:
    """Share of groups whose completions are all right."""
    share = float(right.all(axis=1).mean())
    return CheckResult(
        share,
        f"{share:.1%} of {len(right)} groups",
        "Some prompts are still unsolved.",
        "The policy always solves these prompts: use harder ones.",
    )


@check(bad="above", warn=0.8)
def all_wrong(right: Flags) -> CheckResult:
    """Share of groups without a right completion."""
    share = float((~right).all(axis=1).mean())
    return CheckResult(
        share,
        f"{share:.1%} of {len(right)} groups",
        "Most prompts are solved at least sometimes.",
        "Most groups have no right answer: train on demonstrations first (warmstart.sft), use easier prompts, or raise "
        "rollout.num_generations.",
    )


@check(bad="below", warn=0.2)
def mixed(right: Flags) -> CheckResult:
    """Share of groups with both right and wrong completions, and the K at which 80% of groups would have both."""
    share, distribution = mixed_share(right), success_distribution(right)
    if distribution is None:
        forecast = "all groups are alike, so no K can be estimated"
    elif k := distribution.samples_for(WANTED):
        beyond = "; too low, or no K is enough, if some prompts are never solved" if k > right.shape[1] else ""
        forecast = f"{WANTED:.0%} would be mixed at K = {k} (beta-binomial{beyond})"
    else:
        forecast = f"no K up to {LARGEST} would mix {WANTED:.0%} (beta-binomial)"
    return CheckResult(
        share,
        f"{share:.1%} of groups at K = {right.shape[1]}; {forecast}",
        "Many groups have both right and wrong answers, from which RLOO learns.",
        f"Few groups have both right and wrong answers; {forecast}.",
    )


@check(bad="above", warn=0.8)
def wasted(right: Flags, num_generations: int) -> CheckResult:
    """Expected share of a round's completions in groups that are all right or all wrong, at the rounds' K."""
    distribution = success_distribution(right)
    share = 1 - (distribution.mixed(num_generations) if distribution else mixed_share(right))
    return CheckResult(
        share,
        f"{share:.1%} at K = {num_generations} ({'beta-binomial' if distribution else 'all are alike'})",
        "Most completions of a round belong to groups with both right and wrong answers.",
        "Most completions of a round would teach nothing about right and wrong: raise rollout.num_generations, or "
        "set rollout.oversample to choose among groups.",
    )


@check(bad="below", warn=0.2, fail=0.01)
def teaching(rewards: Array, rewarded: bool) -> CheckResult | None:
    """Share of groups with at least two different rewards; does not apply to a run that learns from a teacher alone."""
    if not rewarded:
        return None
    import numpy as np

    from rloo_pipeline.checks.statistics import informative

    scored = rewards[~np.isnan(rewards)]
    share = informative(rewards)
    alike = (
        f"all {len(scored)} scored completions of all probe prompts got the same reward ({scored[0]:g})"
        if len(set(scored)) == 1
        else f"only {share:.0%} of groups have different rewards"
    )
    return CheckResult(
        share,
        f"{share:.1%} of groups",
        "Rewards differ within the groups.",
        f"{alike}, so RLOO could learn {'nothing' if share == 0 else 'little'}; train on demonstrations first "
        "(warmstart.sft), use easier prompts or rewards, or raise rollout.temperature or num_generations.",
    )


def mixed_share(right: Flags) -> float:
    """Share of the probe's groups that have both right and wrong completions."""
    return float((right.any(axis=1) & ~right.all(axis=1)).mean())


def success_distribution(right: Flags) -> SuccessDistribution | None:
    """The distribution, over prompts, of the chance that a completion is right; None if all groups are alike."""
    return fit(right.sum(axis=1), right.shape[1])


class SuccessDistribution(NamedTuple):
    """The Beta distribution of p, given by its parameters."""

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


def fit(right: Sequence[int] | NDArray[np.int64], samples: int) -> SuccessDistribution | None:
    """Fits the distribution by maximum likelihood.

    Args:
        right: number of right completions of each prompt.
        samples: completions per prompt.

    Returns:
        None if all completions of all prompts are right, or all wrong: no distribution is likelier than any other.
    """
    import numpy as np
    from scipy.optimize import minimize
    from scipy.special import betaln

    counts = np.asarray(right)
    if counts.sum() in (0, samples * len(counts)):
        return None
    values, times = np.unique(counts, return_counts=True)
    ways = -np.log(samples + 1) - betaln(samples - values + 1, values + 1)

    def loss(log_ab: NDArray[np.float64]) -> float:
        a, b = np.exp(log_ab)
        return -float((times * (ways + betaln(values + a, samples - values + b) - betaln(a, b))).sum())

    mean = counts.mean() / samples
    start = np.log([max(mean, 0.01), max(1 - mean, 0.01)])
    optimum = minimize(loss, start, method="L-BFGS-B", bounds=[(-7, 7), (-7, 7)])
    return SuccessDistribution(*map(float, np.exp(optimum.x)))
