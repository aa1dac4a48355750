"""How other rewards would have changed what a round teaches: rankings, informative groups, advantages.

Rankings are compared within each prompt's completions, by Kendall's tau-b and Spearman's rho over those that both
rewards score; a group in which either reward is the same for all has no ranking and is left out. A group is informative
where at least two of its rewards differ: RLOO learns from no other.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Change(NamedTuple):
    """One round, or all of them; None where there is nothing to compare."""

    groups: int
    ranked_groups: int
    """Groups that both rewards rank."""
    kendall: float | None
    spearman: float | None
    reward: tuple[float | None, float | None]
    """Mean, old and new."""
    unscorable: tuple[int, int]
    """Completions without a reward, old and new."""
    informative: tuple[float, float]
    """Share of groups whose rewards differ, old and new."""
    variance: tuple[float | None, float | None]
    """Mean variance of the rewards within a group, old and new."""
    completions: int
    advantage_correlation: float | None
    """Pearson's, over completions."""
    sign_changes: float
    """Share of completions whose advantage turns from positive to negative or back."""
    silenced: float
    """Share of completions whose advantage becomes 0."""
    awakened: float
    """Share of completions whose advantage was 0 and is no longer."""


def change(
    old: Sequence[Sequence[float]],
    new: Sequence[Sequence[float]],
    old_advantages: Sequence[Sequence[float]],
    new_advantages: Sequence[Sequence[float]],
) -> Change:
    """What changed in a round.

    Args:
        old: rewards [prompts, samples], NaN where unscorable.
        new: the same completions' other rewards.
        old_advantages: advantages [prompts, samples].
        new_advantages: the same completions' other advantages.
    """
    before, after = np.asarray(old, dtype=float), np.asarray(new, dtype=float)
    ranked = [pair for pair in map(_rankings, before, after) if pair is not None]
    was, now = (np.asarray(values, dtype=float).ravel() for values in (old_advantages, new_advantages))
    return Change(
        groups=len(before),
        ranked_groups=len(ranked),
        kendall=_mean([tau for tau, _ in ranked]),
        spearman=_mean([rho for _, rho in ranked]),
        reward=(_mean(before[~np.isnan(before)]), _mean(after[~np.isnan(after)])),
        unscorable=(int(np.isnan(before).sum()), int(np.isnan(after).sum())),
        informative=(_informative(before), _informative(after)),
        variance=(_variance(before), _variance(after)),
        completions=len(was),
        advantage_correlation=_correlation(was, now),
        sign_changes=float(np.mean(was * now < 0)),
        silenced=float(np.mean((was != 0) & (now == 0))),
        awakened=float(np.mean((was == 0) & (now != 0))),
    )


def together(rounds: Sequence[Change]) -> Change:
    """All rounds as one: means over rounds, each weighted by what it was taken over."""
    groups, ranked = [one.groups for one in rounds], [one.ranked_groups for one in rounds]
    rows = [one.completions for one in rounds]

    def pair(name: str, weights: Sequence[int]) -> tuple[float | None, float | None]:
        first, second = zip(*(getattr(one, name) for one in rounds), strict=True)
        return _weighted(first, weights), _weighted(second, weights)

    def mean(name: str, weights: Sequence[int]) -> float | None:
        return _weighted([getattr(one, name) for one in rounds], weights)

    informative = pair("informative", groups)
    return Change(
        groups=sum(groups),
        ranked_groups=sum(ranked),
        kendall=mean("kendall", ranked),
        spearman=mean("spearman", ranked),
        reward=pair("reward", rows),
        unscorable=(sum(one.unscorable[0] for one in rounds), sum(one.unscorable[1] for one in rounds)),
        informative=(informative[0] or 0.0, informative[1] or 0.0),
        variance=pair("variance", groups),
        completions=sum(rows),
        advantage_correlation=mean("advantage_correlation", rows),
        sign_changes=mean("sign_changes", rows) or 0.0,
        silenced=mean("silenced", rows) or 0.0,
        awakened=mean("awakened", rows) or 0.0,
    )


def columns(found: Change | None = None) -> dict[str, str]:
    """A row of the table for people: heading → value."""

    def pair(values: tuple[float | None, float | None] | None, form: str) -> str:
        return " → ".join("–" if value is None else format(value, form) for value in values or ())

    def one(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return {
        "mean reward": pair(found and found.reward, ".3f"),
        "unscorable": pair(found and found.unscorable, "d"),
        "Kendall τ": one(found and found.kendall, ".3f"),
        "Spearman ρ": one(found and found.spearman, ".3f"),
        "informative groups": pair(found and found.informative, ".1%"),
        "variance in a group": pair(found and found.variance, ".3g"),
        "advantages: correlation": one(found and found.advantage_correlation, ".3f"),
        "sign turns": one(found and found.sign_changes, ".1%"),
        "to 0": one(found and found.silenced, ".1%"),
        "from 0": one(found and found.awakened, ".1%"),
    }


def _rankings(old: Array, new: Array) -> tuple[float, float] | None:
    """Kendall's tau-b and Spearman's rho of one group; None where one of the two does not rank it."""
    from scipy.stats import kendalltau, spearmanr

    both = ~(np.isnan(old) | np.isnan(new))
    first, second = old[both], new[both]
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(kendalltau(first, second).statistic), float(spearmanr(first, second).statistic)


def _informative(rewards: Array) -> float:
    """Share of groups with at least two different rewards."""
    return float(np.mean([len(set(group[~np.isnan(group)])) > 1 for group in rewards]))


def _variance(rewards: Array) -> float | None:
    """Mean over groups of the variance of their known rewards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group with fewer than two
        return _mean([value for value in np.nanvar(rewards, axis=1, ddof=1) if np.isfinite(value)])


def _correlation(old: Array, new: Array) -> float | None:
    return None if np.ptp(old) == 0 or np.ptp(new) == 0 else float(np.corrcoef(old, new)[0, 1])


def _mean(values: Sequence[float] | Array) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _weighted(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight]
    return sum(v * w for v, w in known) / sum(w for _, w in known) if known else None
