"""Workers of reward functions that a warm worker (`kept`) starts ahead of the next round, while others train.

They have loaded their function and called it for nothing, as those that a stage starts itself. A stage uses them up, so
nothing goes from one round to the next but how fast a function was, by which calls are handed out and no score changes.
They may have scored a table, or its first rows, before the stage that is about it began (`hand_on`); whether it is
just that is for the stage to see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rloo_pipeline import kept
from rloo_pipeline.provenance import source_digest
from rloo_pipeline.rewards.schedule import Crews

if TYPE_CHECKING:
    from rloo_pipeline.config import Config, Reward
    from rloo_pipeline.rewards.job import Pace

NAME = "reward functions"


def crews(config: Config, rewards: Sequence[Reward]) -> Crews:
    """The workers of these functions: those that were started ahead for them, else new ones."""
    waiting, key = kept.take(NAME, None), _key(config, rewards)
    if isinstance(waiting, Crews):
        if waiting.key == key and waiting.alive:
            return waiting
        waiting.end()
    return _start(key, config, rewards)


def start_next(config: Config, rewards: Sequence[Reward], paces: Mapping[str, Pace]) -> None:
    """Starts workers for a stage like this one, as soon as this one is over; none that would hold a GPU meanwhile.

    Args:
        config, rewards: the stage's.
        paces: of the functions in this one, by name.
    """

    def start() -> None:
        # the key first: a file that is changed in between makes them others than it says
        hand_on(_start(_key(config, rewards), config, rewards, paces))

    if rewards and not any(reward.gpus for reward in rewards):
        kept.afterwards(start)


def hand_on(crews: Crews) -> None:
    """Leaves workers, and what they have done, to whoever asks for it next."""
    kept.keep(NAME, None, crews)


def _start(
    key: object, config: Config, rewards: Sequence[Reward], paces: Mapping[str, Pace] = MappingProxyType({})
) -> Crews:
    crews = Crews(rewards, config.scoring.workers, paces)
    crews.key = key
    return crews


def _key(config: Config, rewards: Sequence[Reward]) -> object:
    """What decides what such workers are: a function's file may have been changed since."""
    return os.getcwd(), source_digest("score", config), config.scoring.workers, list(rewards)
