"""Tensor shapes in annotations are checked in tests: a wrong one raises at the call."""

import sys

import pytest
import shape_checks
import torch
from jaxtyping import TypeCheckError

from rloo_pipeline.algorithm import advantages, kl, nan_stats
from rloo_pipeline.algorithm.loss import Bounds, losses
from rloo_pipeline.training import batch, layout, logprobs, objective, packing, selection
from rloo_pipeline.training.kernels import attention

LOGPS, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
HEADS = torch.zeros(1, 4, 5, 8)
IDS = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (advantages.rloo, [torch.zeros(4)]),
        (advantages.rloo.formula, [torch.zeros(4)]),
        (nan_stats.teaching, [torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool)]),
        (kl.k3, [LOGPS, torch.zeros(3, 2)]),
        (kl.estimate, ["k1", LOGPS, LOGPS, MASK.float()]),
        (losses, [LOGPS, LOGPS, torch.zeros(3), MASK, "sequence", "ppo", Bounds(0.2, 0.2)]),
        (packing.pack([[1]], [[2, 3]]).unpack, [torch.zeros(())]),
        (layout.lay_out, [IDS, IDS, IDS, torch.zeros(3, dtype=torch.long)]),
        (attention.packed_attention, [torch.nn.Module(), HEADS, HEADS[:, :, :4], HEADS, None]),
    ],
)
def test_a_wrong_shape_raises(function, arguments) -> None:
    with pytest.raises(TypeCheckError):
        function(*arguments)


def test_a_right_shape_does_not() -> None:
    losses(LOGPS, LOGPS, torch.zeros(2), MASK, "sequence", "ppo", Bounds(0.2, 0.2))


def test_the_listed_modules_are_checked() -> None:
    functions = (
        batch.make_batch,
        selection.select,
        logprobs.TokenLogProbs.forward,
        objective.StepLoss.__call__,
        packing.pack,
    )
    assert all(hasattr(function, "__wrapped__") for function in functions)
    checked = {name for name in sys.modules if name.startswith(shape_checks.CHECKED)}
    assert all(any(name.startswith(prefix) for name in checked) for prefix in shape_checks.CHECKED)
