"""Measures how different rewards would have changed a round: rankings, informative groups, advantages.

Rankings are compared within each prompt's completions, by Kendall's tau-b over the completions that both rewards
score. A group in which all values of either reward are equal has no ranking and is left out. A group is informative if
at least two of its rewards differ; RLOO learns only from such groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rloo_pipeline.checks.statistics import Array, informative


class Change(NamedTuple):
    """The changes in one round or in all rounds; None if there is nothing to compare. Pairs are (old, new)."""

    groups: int
    ranked_groups: int
    """Groups that both rewards rank."""
    kendall: float | None
    reward: tuple[float | None, float | None]
    """Mean reward."""
    unscorable: tuple[int, int]
    """Completions without a reward."""
    informative: tuple[float, float]
    """Share of groups whose rewards differ."""
    completions: int
    advantage_correlation: float | None
    """Pearson's r, over completions."""
    sign_changes: float
    """Share of completions whose advantage changes sign."""


def change(
    old: Sequence[Sequence[float]],
    new: Sequence[Sequence[float]],
    old_advantages: Sequence[Sequence[float]],
    new_advantages: Sequence[Sequence[float]],
) -> Change:
    """Compares old and new rewards of the same completions, of a round or of all rounds.

    Args:
        old: rewards [prompts, samples], NaN for unscorable completions.
        new: the new rewards, in the same form.
        old_advantages: advantages from the old rewards, [prompts, samples].
        new_advantages: advantages from the new rewards, [prompts, samples].
    """
    before, after = np.asarray(old, dtype=float), np.asarray(new, dtype=float)
    ranked = [tau for tau in map(_kendall, before, after) if tau is not None]
    first, second = (np.asarray(values, dtype=float).ravel() for values in (old_advantages, new_advantages))
    return Change(
        groups=len(before),
        ranked_groups=len(ranked),
        kendall=_mean(ranked),
        reward=(_mean(before[~np.isnan(before)]), _mean(after[~np.isnan(after)])),
        unscorable=(int(np.isnan(before).sum()), int(np.isnan(after).sum())),
        informative=(informative(before), informative(after)),
        completions=len(first),
        advantage_correlation=_correlation(first, second),
        sign_changes=float(np.mean(first * second < 0)),
    )


def columns(change: Change) -> dict[str, str]:
    """A row of the printed table, heading → text."""

    def pair(values: tuple[float | None, float | None], form: str) -> str:
        return " → ".join(single(value, form) for value in values)

    def single(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return {
        "mean reward": pair(change.reward, ".3f"),
        "unscorable": pair(change.unscorable, "d"),
        "Kendall τ": single(change.kendall, ".3f"),
        "informative groups": pair(change.informative, ".1%"),
        "advantages: correlation": single(change.advantage_correlation, ".3f"),
        "sign changes": single(change.sign_changes, ".1%"),
    }


def _kendall(old: Array, new: Array) -> float | None:
    """Kendall's tau-b of one group; None if one of the rewards does not rank it."""
    from scipy.stats import kendalltau

    both = ~(np.isnan(old) | np.isnan(new))
    first, second = old[both], new[both]
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(kendalltau(first, second).statistic)


def _correlation(old: Array, new: Array) -> float | None:
    return None if np.ptp(old) == 0 or np.ptp(new) == 0 else float(np.corrcoef(old, new)[0, 1])


def _mean(values: Sequence[float] | Array) -> float | None:
    return float(np.mean(values)) if len(values) else None
