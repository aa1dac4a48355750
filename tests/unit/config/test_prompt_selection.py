"""`dataset.select`: what is refused, and which stages a change of it runs again."""

import pytest
from helpers import mini

from rloo_pipeline.config import STAGES, Config
from rloo_pipeline.config.loading import load_rewards, validate
from rloo_pipeline.errors import UserError


def with_select(**select) -> Config:
    return Config(**mini(dataset={"select": select}, correct={"reward": "answer"}))


@pytest.mark.parametrize(
    ("select", "correct", "message"),
    [
        ({}, "answer", "does not select anything; set pass_rate or weights"),
        ({"pass_rate": [0.9, 0.1]}, "answer", "[0.9, 0.1] is not a range of shares"),
        ({"pass_rate": [0.1, 1.1]}, "answer", "[0.1, 1.1] is not a range of shares"),
        ({"pass_rate": [0.3, 0.4], "num_generations": 4}, "answer", "no share of 4 completions lies in [0.3, 0.4]"),
        ({"pass_rate": [0.1, 0.9]}, None, "set correct.reward to the reward that decides (answer, format, worked)"),
        ({"weight": "online"}, "answer", "unknown key 'dataset.select.weight'; did you mean 'weights'?"),
        ({"weights": "on"}, "answer", "dataset.select.weights: Input should be 'none', 'static' or 'online'"),
    ],
)
def test_what_selects_nothing_gives_a_one_line_error(select, correct, message) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as refused:
        validate(mini(dataset={"select": select}, correct={"reward": correct}), "test.yaml")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        ({"pass_rate": (0.2, 0.9)}, {"rollout", "refill", "report"}),
        ({"weights": "online"}, {"rollout", "refill", "report"}),
        ({"num_generations": 16}, {"difficulty", "report"}),
    ],
)
def test_a_key_decides_the_stages_that_use_it(changed, stages) -> None:
    before = with_select(pass_rate=(0.1, 0.9))
    after = with_select(**{"pass_rate": (0.1, 0.9)} | changed)
    assert {stage for stage in STAGES if before.params(stage) != after.params(stage)} == stages


@pytest.mark.parametrize(
    ("number", "changed", "same"),
    [(1, {"options": {"strict": True}}, True), (0, {"weight": 0.5}, True), (0, {"options": {"strict": True}}, False)],
)
def test_only_the_reward_that_decides_decides_the_pass_rates(number, changed, same) -> None:
    before = with_select(weights="static")
    rewards = [*before.rewards]
    rewards[number] = rewards[number].model_copy(update=changed)
    after = before.model_copy(update={"rewards": rewards})
    assert before.params("score") != after.params("score")
    assert (before.params("difficulty") == after.params("difficulty")) is same


def test_the_size_of_a_round_does_not_sample_the_pass_rates_again() -> None:
    before = with_select(weights="static").params("difficulty")
    larger = mini(dataset={"select": {"weights": "static"}}, correct={"reward": "answer"})
    larger["rollout"] |= {"generation_batch_size": 128, "num_generations": 8, "oversample": 1.5, "lag": 1}
    assert Config(**larger).params("difficulty") == before
    larger["rollout"] |= {"temperature": 0.7}
    assert Config(**larger).params("difficulty") != before


def test_other_rewards_can_be_tried_on_a_run_that_selects(tmp_path) -> None:
    file = tmp_path / "rewards.yaml"
    file.write_text("rewards:\n  - {function: 'rloo_pipeline.rewards.format:shows_work', name: other}\n")
    assert [reward.column for reward in load_rewards(file, with_select(weights="online"))] == ["other"]
