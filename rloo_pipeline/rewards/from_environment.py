"""The reward that the environment of an episode gave: what its `get_reward()` returned at the end.

It stands in the rollouts, so that scoring an old table again needs no environment.
"""

from __future__ import annotations

from typing import Any


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """Rewards of the environments.

    Args:
        environment_reward: column of the rollouts; None where an environment has no `get_reward` or lost an episode.

    Returns:
        The column.
    """
    return environment_reward
