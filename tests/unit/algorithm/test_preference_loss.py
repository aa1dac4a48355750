"""The loss of a reward model is that of the papers, pair by pair, and so is its gradient."""

import math

import pytest
import torch

from rloo_pipeline.algorithm.preference_loss import bradley_terry

CHOSEN, REJECTED, MARGINS = [2.0, -1.0, 0.5, 40.0], [1.0, 0.0, 0.5, -40.0], [0.0, 0.5, 2.0, 0.0]


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_loss_and_its_gradient_are_those_of_a_loop_in_float64(center) -> None:
    chosen, rejected, margins = (torch.tensor(values, dtype=torch.float64) for values in (CHOSEN, REJECTED, MARGINS))
    chosen.requires_grad_()
    losses = bradley_terry(chosen, rejected, margins, center)
    losses.sum().backward()
    for pair, (c, r, m) in enumerate(zip(CHOSEN, REJECTED, MARGINS, strict=True)):
        assert losses[pair].item() == pytest.approx(math.log1p(math.exp(-(c - r - m))) + center * (c + r) ** 2)
        slope = -1 / (1 + math.exp(c - r - m)) + 2 * center * (c + r)
        assert chosen.grad[pair].item() == pytest.approx(slope, abs=1e-12)
