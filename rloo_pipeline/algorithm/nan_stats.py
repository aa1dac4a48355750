"""Statistics over what is known: NaN stands for a value that does not exist, and takes no part.

Nothing here is a difference of large numbers: values are taken from their lowest one before anything is added up, and
the siblings of a sample are added up without it. So what is equal has a deviation of exactly 0, whatever its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rloo_pipeline.algorithm.shapes import PerPrompt, PerSample

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""
ROUNDING = 16
"""Units in the last place up to which values count as equal: weighted sums of rewards are rounded a few times."""


def count(values: Tensor) -> Tensor:
    """How many values of the last dimension are known, [..., 1]."""
    return (~values.isnan()).sum(-1, keepdim=True)


def mean(values: Tensor) -> Tensor:
    """Their mean, [..., 1]; NaN where none is known."""
    return values.nanmean(-1, keepdim=True)


def centred(values: Tensor) -> Tensor:
    """Values less their mean over the last dimension; exactly 0 where all are equal."""
    shifted = values - values.nan_to_num(torch.inf).amin(-1, keepdim=True)
    return shifted - mean(shifted)


def others(values: Tensor) -> Tensor:
    """The siblings of each value, [..., n] → [..., n, n]: row i has all of them but the i-th, which is NaN there."""
    own = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    return torch.where(own, torch.nan, values.unsqueeze(-2))


def rounding(values: Tensor) -> Tensor:
    """By how much equal values of this size may differ, [..., 1]: 16 units in the last place of the largest."""
    largest = values.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    return ROUNDING * torch.finfo(values.dtype).eps * largest


def std(values: Tensor) -> Tensor:
    """Their standard deviation with Bessel's correction, [..., 1]; NaN where fewer than two are known."""
    squares = centred(values).square().nansum(-1, keepdim=True)
    degrees = count(values) - 1
    return torch.where(degrees > 0, squares / degrees.clamp(min=1), torch.nan).sqrt()


def whiten(values: Tensor, divide: bool = True) -> Tensor:
    """Values of any shape less their mean over the whole tensor, divided by their standard deviation.

    Args:
        values: NaN where unknown. A single known one has no deviation to divide by.
        divide: false leaves the deviation out.
    """
    flat = values.flatten()
    left = centred(flat)
    if divide and int(count(flat)) > 1:
        left = left / (std(flat) + STD_EPSILON)
    return left.view_as(values)


def differ(values: Tensor) -> bool:
    """Whether any two known values of the whole tensor are unequal by more than rounding."""
    flat = values.flatten()
    return bool((centred(flat).abs() > rounding(flat)).any())


def teaching(rewards: PerSample, in_loss: Tensor) -> PerPrompt:
    """Groups that teach, bool: a completion in the loss has a reward other than its group's mean, so an advantage that
    is not 0. A group of equal rewards does not, nor one with a single known reward, nor one without a loss.

    Args:
        rewards: of all that is in the baseline; NaN for what is not.
        in_loss: [prompts, samples] bool, which of them have a loss.
    """
    return ((centred(rewards).abs() > rounding(rewards)) & in_loss).any(-1)


def first_of(teaches: PerPrompt, wanted: int) -> list[int]:
    """The first `wanted` groups that teach, in their order; where there are fewer, filled up with the first of the
    others (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2, with a fixed surplus instead of resampling).
    """
    good = teaches.tolist()
    ranked = sorted(range(len(good)), key=lambda group: (not good[group], group))
    return sorted(ranked[:wanted])
