"""The check of a user's loss (`algorithm.loss`) for `rloo check`: shapes, independence of completions, gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rloo_pipeline.before_run.findings import Finding, RunInputs, problems_of
from rloo_pipeline.errors import UserError, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_pipeline.algorithm.loss import OwnLoss

STEP, TOLERANCE = 1e-6, 1e-5
"""Step of finite differences in float64, and the error of a derivative that rounding explains."""


def own_loss(inputs: RunInputs) -> Iterator[Finding]:
    """The user's loss works on random numbers in float64, and has the derivative of its value as gradient."""
    name = inputs.config.algorithm.loss
    if name is None:
        return
    with problems_of("loss") as problems:
        from rloo_pipeline.training import objective

        try:
            note = try_loss(name, objective.own_loss(name))
        except UserError:
            raise
        except Exception as error:
            message = one_line(f"{type(error).__name__}: {error}", 200)
            raise UserError(f"algorithm.loss: {name} raised {message}; correct it") from error
        yield Finding("loss", True, f"{name}: {note}", note=note != PROVEN)
    yield from problems


PROVEN = "its gradient is the derivative of its value, in float64"


def try_loss(name: str, function: OwnLoss) -> str:
    """Calls the loss with random numbers.

    Returns:
        A sentence about its gradient.

    Raises:
        UserError: it has no gradient or one that is not finite, or a completion or padding changes the loss of others.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    logps, old = -torch.rand((2, 4, 5), generator=draw, dtype=torch.float64) * 3
    advantages = torch.randn((4, 1), generator=draw, dtype=torch.float64).expand(4, 5)
    mask = torch.arange(5) < torch.tensor([[5], [2], [4], [1]])

    def loss(values: Tensor, rows: slice = slice(None)) -> Tensor:
        result = function(values[rows], old[rows], advantages[rows], mask[rows])
        return torch.where(mask[rows], result, 0.0)

    leaf = logps.clone().requires_grad_()
    value = loss(leaf)
    if not value.requires_grad:
        raise UserError(f"algorithm.loss: {name} does not depend on logps, so nothing is learned; use them undetached")
    [gradient] = torch.autograd.grad(value.sum(), leaf)
    if not bool(value.isfinite().all() and gradient.isfinite().all()):
        raise UserError(f"algorithm.loss: {name} gives values that are not finite for ordinary log-probs; correct it")
    alone = torch.cat([loss(logps, slice(row, row + 1)) for row in range(4)])
    if not torch.allclose(alone, value.detach()) or not torch.allclose(
        loss(torch.where(mask, logps, -7.0)), value.detach()
    ):
        raise UserError(
            f"algorithm.loss: in {name} a completion, or a token outside of the mask, changes the loss of others; "
            "micro-batches split a step, so leave means over completions to loss_agg_mode, and use the mask"
        )
    steps = torch.eye(20, dtype=torch.float64).view(20, 4, 5) * STEP
    slopes = torch.stack([(loss(logps + step) - loss(logps - step)).sum() / (2 * STEP) for step in steps]).view(4, 5)
    if torch.allclose(slopes, gradient, rtol=TOLERANCE, atol=TOLERANCE):
        return PROVEN
    return "its gradient is not the derivative of its value; that is right only if it detaches a factor on purpose"
