"""Win rate of a policy against another: by scores of each completion alone, or by a judge that compares two."""

import numpy as np

from rloo_pipeline.checks.statistics import Array, Estimate, estimate_share, prompt_means


def win_rate(before: Array, after: Array) -> Estimate | None:
    """Chance that a completion of one policy scores higher than one of the other for the same prompt; ties count half.

    The rate of a prompt is the mean over all pairs of its scored completions; the interval is over prompts.

    Args:
        before: [prompts, samples] scores of the other policy, NaN where there is none.
        after: [prompts, samples] scores of the policy, NaN where there is none.

    Returns:
        The rate, or None if no prompt has scores of both.
    """
    differences = after[:, :, None] - before[:, None, :]
    wins = np.where(np.isnan(differences), np.nan, (np.sign(differences) + 1) / 2)
    return _over_prompts(wins.reshape(len(wins), -1))


def judged_rate(verdicts: Array) -> tuple[Estimate | None, float | None]:
    """Mean verdict over pairs of completions that a judge has compared in both orders.

    Args:
        verdicts: [orders, prompts, samples], how much better the policy's completion is, from 0 to 1; NaN for none.

    Returns:
        The rate, with its interval over prompts, and the share of pairs for which both orders name the same completion
        or neither; both None if no pair has two verdicts.
    """
    both = ~np.isnan(verdicts).any(axis=0)
    named = np.sign(verdicts[:, both] - 0.5)
    same = float((named[0] == named[1]).mean()) if both.any() else None
    return _over_prompts(verdicts.mean(axis=0)), same


def _over_prompts(wins: Array) -> Estimate | None:
    """The mean over prompts of [prompts, pairs], NaN for pairs that do not count."""
    values = prompt_means(wins)
    return estimate_share(values, wins.shape[1]) if len(values) else None
