"""The demo's teacher is trained with a rate that rises to its peak and falls to 0."""

import pytest

from rloo_pipeline.demo.trained_model import share_of_peak


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "shares"),
    [
        (6, 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        (2, 4, [0.25, 0.5, 0.0]),
        (2, 2, [0.5, 1.0, 0.0]),
        (2, 0, [1.0, 0.5, 0.0]),
    ],
)
def test_the_learning_rate_is_never_negative_however_few_steps_there_are(steps, warmup_steps, shares) -> None:
    assert [share_of_peak(step, steps, warmup_steps) for step in range(steps + 1)] == shares
