"""Advantage estimators: `[prompts, samples]` rewards in, advantages of the same shape out. NaN = unscorable.

A new estimator is a function here; its name is what `algorithm.advantage` takes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rloo(rewards: Tensor) -> Tensor:
    """REINFORCE leave-one-out: A_i = R_i − mean_{j≠i} R_j.

    Ahmadian et al. 2024 (arXiv 2402.14740), equation 8; Kool et al. 2019. The baseline of a sample is the mean over its
    scorable siblings and never contains the sample itself, so the gradient estimate is unbiased.

    Args:
        rewards: [prompts, samples], NaN where a completion could not be scored.

    Returns:
        [prompts, samples]; 0 for unscorable samples and in groups with fewer than two scorable ones.
    """
    scorable = ~rewards.isnan()
    known = rewards.nan_to_num(0.0)
    siblings = scorable.sum(-1, keepdim=True) - 1
    baseline = (known.sum(-1, keepdim=True) - known) / siblings.clamp(min=1)
    return torch.where(scorable & (siblings >= 1), known - baseline, 0.0)


def normalize(advantages: Tensor, counted: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over the whole batch (TRL's normalize_advantages).

    Args:
        advantages: [prompts, samples].
        counted: [prompts, samples] bool, the samples that mean and standard deviation are taken over.

    Returns:
        [prompts, samples]; unchanged where not counted.
    """
    values = advantages[counted]
    if values.numel() < 2:
        return advantages
    return torch.where(counted, (advantages - values.mean()) / (values.std() + epsilon), advantages)


def uninformative(rewards: Tensor) -> Tensor:
    """[prompts] bool: groups that teach nothing, since their scorable rewards are all equal or fewer than two."""
    scorable = ~rewards.isnan()
    low = rewards.nan_to_num(torch.inf).amin(-1)
    high = torch.where(scorable, rewards, -torch.inf).amax(-1)
    return (scorable.sum(-1) < 2) | (low == high)
