"""The reward from the environment of an episode: the return value of `get_reward()` at its end.

It is stored in the rollouts, so re-scoring an old table needs no environment.
"""

from __future__ import annotations

from typing import Any

from rloo_pipeline.errors import UserError


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """Rewards of the environments.

    Args:
        environment_reward: column of the rollouts; None without a `get_reward`, or if the episode was lost.

    Returns:
        The column.
    """
    return environment_reward


def environment_part(environments: list[Any], part: str, of: str = "rewards", **_: Any) -> list[float | None]:
    """One reward by name, for environments that give several, such as those of verifiers.

    Args:
        environments: public attributes of each episode's environment.
        part: name of the reward.
        of: attribute with a dict of numbers by name; `metrics` for the metrics of verifiers.

    Returns:
        The numbers; None where an episode was lost.

    Raises:
        UserError: an environment does not have a reward of this name.
    """
    found: list[float | None] = []
    for environment in environments:
        numbers = getattr(environment, of, None) if vars(environment) else {part: None}
        if not isinstance(numbers, dict) or part not in numbers:
            there = ", ".join(sorted(numbers or ())) or "none"
            raise UserError(f"an environment has no '{part}' among its {of} ({there}); correct the option part")
        found.append(numbers[part])
    return found
