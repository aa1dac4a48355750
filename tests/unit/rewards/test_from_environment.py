"""Rewards that environments gave, by name."""

from types import SimpleNamespace

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.from_environment import environment_part


def test_a_part_of_the_reward_is_known_by_its_name_and_none_for_a_lost_episode() -> None:
    played = SimpleNamespace(rewards={"exact": 1.0, "short": 0.5}, metrics={"turns": 2.0})
    assert environment_part([played, SimpleNamespace()], "short") == [0.5, None]
    assert environment_part([played], "turns", of="metrics") == [2.0]
    with pytest.raises(UserError, match=r"no 'shrot' among its rewards \(exact, short\); correct the option part"):
        environment_part([played], "shrot")
