"""A run trains a reward model only if a reward uses it, and the keys that both have fit together."""

import pytest
from helpers import merged, mini

from rloo_pipeline.config import Config

SECTION = {"train": {"path": "pairs.jsonl"}}
USED = {"function": "rloo_pipeline.rewards.model:reward_model"}


def configured(**changes) -> Config:
    return Config.model_validate(
        mini(**merged({"reward_model": SECTION, "rewards": [USED, *mini()["rewards"]]}, changes))
    )


REFUSED = {
    "rewards: reward_model names no model": {"reward_model": None},
    "reward_model: no reward uses it": {"rewards": [USED | {"options": {"model": "x"}}, *mini()["rewards"]]},
    "reward_model is trained without output": {"rewards": [USED | {"options": {"output": 1}}, *mini()["rewards"]]},
    "give at most one of name_or_path and build": {"reward_model": {"name_or_path": "a", "build": "b:c"}},
    "reward_model cannot be used with deepspeed.sequence_parallel: 2": {
        "deepspeed": {"processes": 2, "sequence_parallel": 2}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_keys_that_do_not_fit_a_reward_model_are_refused(message) -> None:
    with pytest.raises(ValueError, match=message):
        configured(**REFUSED[message])


def test_only_rewards_without_a_model_get_that_of_the_run() -> None:
    other = USED | {"name": "other", "options": {"model": "another"}}
    config = configured(rewards=[USED, other, *mini()["rewards"]]).with_reward_model("here")
    assert [reward.options.get("model") for reward in config.rewards] == ["here", "another", None, None, None]


def test_it_starts_from_the_model_of_the_run_or_from_another() -> None:
    assert configured().of_reward_model.model.build == mini()["model"]["build"]
    other = configured(reward_model={"name_or_path": "other"}).of_reward_model.model
    assert (other.name_or_path, other.build, other.dtype) == ("other", None, "float32")
