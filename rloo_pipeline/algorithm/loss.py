"""The clipped policy-gradient loss (Schulman et al. 2017, arXiv 1707.06347, equation 7) at three levels of action.

RLOO takes the whole completion as one action (Ahmadian et al. 2024, section 3.1), so its ratio is that of sequences:
ρ = exp(Σ_t (log π_θ − log π_old)) and the loss of a completion is −min(ρA, clip(ρ, 1−ε, 1+ε_high)A).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Level = Literal["sequence", "sequence_mean", "token"]


class Surrogate(NamedTuple):
    """The loss of each completion and what the clip did to it."""

    loss: Tensor
    """[completions]; the batch's loss is their mean."""
    ratio: Tensor
    """[completions], detached; at token level the mean over the completion's tokens."""
    clipped: Tensor
    """[completions], detached: share of the completion's actions on which the clip took the gradient away."""


def log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: Level) -> Tensor:
    """log ρ of each action.

    Args:
        logps, old_logps: [completions, tokens].
        mask: [completions, tokens] bool, true on the completion's tokens.
        level: `sequence` sums over tokens (RLOO), `sequence_mean` takes their mean (GSPO, arXiv 2507.18071, equation
        7),
            `token` leaves them apart (PPO, GRPO).

    Returns:
        [completions, 1], or [completions, tokens] at token level.
    """
    difference = torch.where(mask, logps - old_logps, 0.0)
    if level == "token":
        return difference
    total = difference.sum(-1, keepdim=True)
    return total if level == "sequence" else total / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    level: Level,
    epsilon: float,
    epsilon_high: float,
) -> Surrogate:
    """PPO's clipped objective, negated, for each completion; at token level the sum over its tokens.

    With ρ = 1 (the first step on fresh samples) the gradient is −A ∇ Σ_t log π_θ at the levels `sequence` and `token`,
    which is REINFORCE, and 1/T of it at `sequence_mean`.

    Args:
        logps: [completions, tokens] under the policy being trained.
        old_logps: [completions, tokens] under the policy that sampled.
        advantages: [completions].
        mask: [completions, tokens] bool.
        level: see `log_ratio`.
        epsilon, epsilon_high: the ratio is clipped to [1 − epsilon, 1 + epsilon_high].
    """
    ratio = log_ratio(logps, old_logps, mask, level).exp()
    actions = mask if level == "token" else torch.ones_like(ratio, dtype=torch.bool)
    weight = advantages.unsqueeze(-1)
    free = ratio * weight
    bound = ratio.clamp(1 - epsilon, 1 + epsilon_high) * weight
    loss = -(torch.minimum(free, bound) * actions).sum(-1)
    count = actions.sum(-1).clamp(min=1)
    with torch.no_grad():
        mean_ratio = (ratio * actions).sum(-1) / count
        clipped = ((bound < free) & actions).sum(-1) / count
    return Surrogate(loss, mean_ratio, clipped)
