"""The learning rate of each optimizer step, in numbers worked out by hand."""

from math import cos, pi

import pytest
from helpers import mini

from rloo_pipeline.config import Config
from rloo_pipeline.training.settings import LearningRate, TrainerSettings

WARMUP = [0.25, 0.5, 0.75, 1.0]
STEPS = [*range(4), 4, 6, 8, 12, 20]
SHARES = {
    "constant": [1.0] * 5,
    "linear": [1.0, 0.1 + 0.9 * 3 / 4, 0.1 + 0.9 / 2, 0.1, 0.1],
    "cosine": [1.0, 0.1 + 0.9 * (1 + cos(pi / 4)) / 2, 0.1 + 0.9 / 2, 0.1, 0.1],
}


@pytest.mark.parametrize("kind", SHARES)
def test_it_warms_up_falls_until_the_horizon_and_then_stays(kind) -> None:
    rate = LearningRate(2e-6, kind, warmup=4, horizon=12, min_ratio=0.1)
    expected = [2e-6 * share for share in (*WARMUP, *SHARES[kind])]
    assert [rate.at_step(step) for step in STEPS] == pytest.approx(expected)


def test_the_horizon_of_an_update_counts_the_optimizer_steps_of_its_rounds() -> None:
    schedule = {"lr_scheduler_type": "cosine", "lr_horizon_rounds": 5, "warmup_steps": 2, "min_lr_ratio": 0.2}
    config = Config(**mini(update=schedule, algorithm={"num_iterations": 3, "steps_per_generation": 2}))
    expected = LearningRate(config.update.learning_rate, "cosine", 2, 5 * 3 * 2, 0.2)
    assert TrainerSettings.from_config(config).learning_rate == expected
