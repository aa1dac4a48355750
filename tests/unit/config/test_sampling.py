"""What follows from the keys of `rollout`."""

import pytest

from rloo_pipeline.config import Rollout


@pytest.mark.parametrize(
    ("prompts", "oversample", "sampled"), [(50, 1.1, 55), (25, 2.2, 55), (10, 1.15, 12), (3, 1.0, 3), (3, 1.5, 5)]
)
def test_a_round_samples_oversample_times_its_prompts_rounded_up(prompts, oversample, sampled) -> None:
    """50 times the float nearest to 1.1 is above 55."""
    rollout = Rollout(num_generations=2, generation_batch_size=2 * prompts, oversample=oversample)
    assert rollout.sampled_prompts == sampled
