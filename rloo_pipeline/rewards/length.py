"""Rewards the length of completions in tokens: a soft limit, or a target length.

`algorithm.response_length` applies both within the update. As rewards, they have a column, a weight and a place in the
report.
"""

from collections.abc import Sequence

from rloo_pipeline.errors import UserError


def overlong_reward(completion_ids: list[list[int]], longest: int, cache: int) -> list[float]:
    """0 up to longest − cache tokens, then falling linearly to −1 at `longest` tokens and beyond.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.

    Raises:
        UserError: `cache` is not between 1 and `longest`.
    """
    if not 0 < cache <= longest:
        raise UserError(
            f"overlong_reward: the option cache must be above 0 and at most longest ({longest}), not {cache}"
        )
    return [max(-1.0, min(0.0, (longest - cache - len(ids)) / cache)) for ids in completion_ids]


def target_length_reward(completion_ids: list[list[int]], target: int | Sequence[int]) -> list[float]:
    """−|length − target| / target.

    Aggarwal and Welleck 2025 (L1, arXiv 2503.04697), equation 1, with α = 1/target.

    Args:
        completion_ids: token ids of each completion.
        target: target length in tokens, as an option or as a dataset column of that name.

    Raises:
        UserError: a target is below 1.
    """
    targets = [target] * len(completion_ids) if isinstance(target, int) else list(target)
    if any(length < 1 for length in targets):
        raise UserError(f"target_length_reward: target must be at least 1 token, not {min(targets)}")
    return [-abs(len(ids) - length) / length for ids, length in zip(completion_ids, targets, strict=True)]
