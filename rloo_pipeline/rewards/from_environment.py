"""The reward that the environment of an episode gave: what its `get_reward()` returned at the end.

It stands in the rollouts, so that scoring an old table again needs no environment.
"""

from __future__ import annotations

from typing import Any

from rloo_pipeline.errors import UserError


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """Rewards of the environments.

    Args:
        environment_reward: column of the rollouts; None where an environment has no `get_reward` or lost an episode.

    Returns:
        The column.
    """
    return environment_reward


def environment_part(environments: list[Any], part: str, of: str = "rewards", **_: Any) -> list[float | None]:
    """One of the rewards of the environments, by its name, as those of verifiers have several.

    Args:
        environments: with a dict `of` of numbers by name.
        part: the name.
        of: the attribute; `metrics` for a metric of verifiers.

    Returns:
        The numbers; None where an episode was lost.

    Raises:
        UserError: an environment has none of this name.
    """
    found: list[float | None] = []
    for environment in environments:
        numbers = getattr(environment, of, None) if vars(environment) else {part: None}
        if not isinstance(numbers, dict) or part not in numbers:
            there = ", ".join(sorted(numbers or ())) or "none"
            raise UserError(f"an environment has no '{part}' among its {of} ({there}); correct the option part")
        found.append(numbers[part])
    return found
