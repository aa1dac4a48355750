"""Takes the reward from an episode's environment: the return value of `get_reward()` at the end of the episode.

It is stored with the rollouts, so re-scoring an old table needs no environment.
"""

from typing import Any

from rloo_pipeline.errors import UserError


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """The rewards that the environments gave.

    Args:
        environment_reward: column of the rollouts; None if there is no `get_reward` or the episode was lost.

    Returns:
        That column.
    """
    return environment_reward


def environment_part(environments: list[Any], part: str, of: str = "rewards", **_: Any) -> list[float | None]:
    """One of several rewards, by name, for environments such as those of verifiers.

    Args:
        environments: objects with the public attributes of each episode's environment.
        part: name of the reward.
        of: attribute that holds a dict of numbers by name; `metrics` for the metrics of verifiers.

    Returns:
        The numbers; None if an episode was lost.

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
