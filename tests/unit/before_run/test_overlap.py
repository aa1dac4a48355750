"""What a lag gives follows from the time of each side."""

from helpers import mini

from rloo_pipeline.before_run.queueing import SideSeconds, lag_lines
from rloo_pipeline.config.loading import validate


def test_a_round_takes_as_long_as_its_longer_side_with_a_lag() -> None:
    sides = SideSeconds(70, 30)
    assert [sides.round_seconds(lag) for lag in (0, 1, 2)] == [100, 70, 70]


def test_the_plan_counts_both_sides() -> None:
    config = validate(mini(rollout={"lag": 1}, deepspeed={"processes": 4}, vllm={"tensor_parallel_size": 2}), "a.yaml")
    first, second = lag_lines(config, SideSeconds(60, 60), "estimated", "GPU")
    assert first == "rollout.lag: 1: 4 GPUs to sample beside 4 to train, 8 at once"
    tools = ["rloo_pipeline.environments.tools:calculator"]
    with_environments = validate(mini(rollout={"lag": 1, "tools": tools, "environment_gpus": 3}), "a.yaml")
    assert next(lag_lines(with_environments, SideSeconds(60, 60), "estimated", "GPU")).startswith(
        "rollout.lag: 1: 8 GPUs to sample"
    )
    assert second.endswith("60.0 s instead of 120.0 s, 2.00 times as fast")
    assert "rollout.lag: 1 (not set)" in next(
        lag_lines(validate(mini(), "a.yaml"), SideSeconds(1, 1), "estimated", "core")
    )
