"""Statistics that ignore NaN, which marks a value that does not exist.

No function subtracts large sums from each other: values are shifted by their minimum before they are added up, and the
siblings of a sample are added up without it. Equal values of any size therefore have a deviation of exactly 0.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""
ROUNDING = 16
"""Values that differ by fewer units in the last place count as equal: sums of rewards are rounded several times."""


def count(values: Float[Tensor, "*batch n"]) -> Int[Tensor, "*batch 1"]:
    """Number of values that are not NaN."""
    return (~values.isnan()).sum(-1, keepdim=True)


def mean(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch 1"]:
    """Mean over the last dimension; NaN if all values are NaN."""
    return values.nanmean(-1, keepdim=True)


def centred(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Values minus their mean over the last dimension; exactly 0 where all are equal."""
    shifted = values - values.nan_to_num(torch.inf).amin(-1, keepdim=True)
    return shifted - mean(shifted)


def siblings(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n n"]:
    """The siblings of each value: row i has all values, with NaN in place of the i-th."""
    own = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    return torch.where(own, torch.nan, values.unsqueeze(-2))


def rounding(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch 1"]:
    """Largest difference between values that count as equal: 16 units in the last place of the largest value."""
    largest = values.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    return ROUNDING * torch.finfo(values.dtype).eps * largest


def merged(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Makes values that differ only by rounding equal: each becomes the smallest of its neighbours."""
    ascending, order = values.sort(-1)
    first = torch.ones_like(ascending, dtype=torch.bool)
    first[..., 1:] = ~(ascending.diff(dim=-1) <= rounding(values))
    places = torch.arange(values.shape[-1], device=values.device).where(first, 0).cummax(-1).values
    return torch.empty_like(values).scatter_(-1, order, ascending.gather(-1, places))


def std(values: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch 1"]:
    """Standard deviation with Bessel's correction; NaN if fewer than two values are not NaN."""
    squares = centred(values).square().nansum(-1, keepdim=True)
    degrees = count(values) - 1
    return torch.where(degrees > 0, squares / degrees.clamp(min=1), torch.nan).sqrt()


def whiten(values: Float[Tensor, "*shape"], divide: bool = True) -> Float[Tensor, "*shape"]:
    """Values minus their mean over the whole tensor, divided by their standard deviation plus ε.

    A value that differs from the mean by rounding alone becomes exactly 0, since its sign would decide what counts as
    clipped.

    Args:
        values: any tensor; with fewer than two values that are not NaN, it is not divided.
        divide: False only subtracts the mean.
    """
    flat = values.flatten()
    result = centred(flat)
    result = result.masked_fill(result.abs() <= rounding(flat), 0.0)
    if divide and int(count(flat)) > 1:
        result = result / (std(flat) + STD_EPSILON)
    return result.view_as(values)


def differ(values: Float[Tensor, "*shape"]) -> bool:
    """True if any two values of the whole tensor differ by more than rounding."""
    flat = values.flatten()
    return bool((centred(flat).abs() > rounding(flat)).any())


def teaching(rewards: Float[Tensor, "prompts K"], in_loss: Bool[Tensor, "prompts K"]) -> Bool[Tensor, " prompts"]:
    """True for groups that teach: some completion in the loss has a reward that differs from the group's mean.

    Groups with equal rewards, with a single scorable sample, or without a completion in the loss do not teach.

    Args:
        rewards: rewards of the completions in the baseline; NaN for all others.
        in_loss: True for completions in the loss.
    """
    return ((centred(rewards).abs() > rounding(rewards)) & in_loss).any(-1)


def first_teaching(teaches: Bool[Tensor, " prompts"], groups: int) -> list[int]:
    """Indices of the first `groups` groups that teach, in ascending order.

    If fewer teach, the list is filled up with the first of the others. This is DAPO's dynamic sampling (arXiv
    2503.14476, section 3.2) with a fixed surplus instead of resampling.
    """
    flags = teaches.tolist()
    ranked = sorted(range(len(flags)), key=lambda group: not flags[group])
    return sorted(ranked[:groups])
