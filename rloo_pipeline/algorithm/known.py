"""Statistics over what is known: NaN stands for a value that does not exist, and takes no part."""

from __future__ import annotations

import torch
from torch import Tensor

from rloo_pipeline.algorithm.shapes import PerPrompt, PerSample

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


def count(values: Tensor) -> Tensor:
    """How many values of the last dimension are known, [..., 1]."""
    return (~values.isnan()).sum(-1, keepdim=True)


def mean(values: Tensor) -> Tensor:
    """Their mean, [..., 1]; NaN where none is known."""
    return values.nanmean(-1, keepdim=True)


def std(values: Tensor) -> Tensor:
    """Their standard deviation with Bessel's correction, [..., 1]; NaN where fewer than two are known."""
    squares = (values - mean(values)).square().nansum(-1, keepdim=True)
    degrees = count(values) - 1
    return torch.where(degrees > 0, squares / degrees.clamp(min=1), torch.nan).sqrt()


def whiten(values: Tensor) -> Tensor:
    """Values of any shape less their mean over the whole tensor, divided by their standard deviation.

    With fewer than two known values there is nothing to standardize by: they come back as they are.
    """
    flat = values.flatten()
    if int(count(flat)) < 2:
        return values
    return (values - mean(flat)) / (std(flat) + STD_EPSILON)


def uninformative(rewards: PerSample) -> PerPrompt:
    """Groups that teach nothing, bool, since their known rewards are all equal or fewer than two."""
    low = rewards.nan_to_num(torch.inf).amin(-1)
    high = rewards.nan_to_num(-torch.inf, neginf=-torch.inf).amax(-1)
    return (count(rewards).squeeze(-1) < 2) | (low == high)


def first_informative(rewards: PerSample, wanted: int) -> list[int]:
    """The first `wanted` groups whose rewards differ, in their order; where there are fewer, filled up with the first
    of the others (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2, with a fixed surplus instead of resampling).
    """
    dull = uninformative(rewards).tolist()
    ranked = sorted(range(len(dull)), key=lambda group: (dull[group], group))
    return sorted(ranked[:wanted])
