"""Policy-gradient losses of actions, and how they become one number.

An action is a whole completion (RLOO: Ahmadian et al. 2024, section 2.2) or a token; with ρ = π_θ/π_old of an action
its loss is

    ppo     −min(ρA, clip(ρ, 1−ε, 1+ε_high)A), where A < 0 at least −δA   (arXiv 1707.06347, equation 7; 1912.09729)
    cispo   −sg[min(ρ, 1+ε_high)] A log π_θ                               (arXiv 2506.13585, equation 5)
    none    −A log π_θ                                                    (Williams 1992)

At ρ = 1, the first step on fresh samples, all have the gradient of the last one (ppo at `sequence_mean`: 1/T of it).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rloo_pipeline.algorithm.shapes import Mask, PerAction, PerCompletion, PerToken, Scalar

Level = Literal["sequence", "sequence_mean", "token"]
Clip = Literal["ppo", "cispo", "none"]
AggMode = Literal[
    "sequence", "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
FARTHEST = 20.0
"""Bound of a log-ratio, that of OpenRLHF, verl and NeMo-RL; ρ = 4.9e8 is clipped in every sense already."""


class Bounds(NamedTuple):
    """How far a ratio counts."""

    epsilon: float
    epsilon_high: float
    delta: float | None = None


class Losses(NamedTuple):
    """The loss of each action and what the clip did to it."""

    loss: PerAction
    """0 outside the mask."""
    ratio: PerCompletion
    """Detached; at token level the mean over the completion's tokens."""
    low: PerCompletion
    """Detached: share of its actions whose gradient was taken away below 1 − ε."""
    high: PerCompletion
    """Detached: the same above 1 + ε_high (CISPO: whose weight was cut)."""


def log_ratio(logps: PerToken, old_logps: PerToken, mask: Mask, level: Level) -> PerAction:
    """log ρ of each action, bounded by ±20: a ratio of infinity would make NaN of an advantage of 0.

    Args:
        level: `sequence` sums over tokens (RLOO), `sequence_mean` takes their mean (GSPO, arXiv 2507.18071,
            equation 7), `token` leaves them apart (PPO, GRPO).
    """
    difference = torch.where(mask, logps - old_logps, 0.0)
    if level != "token":
        difference = difference.sum(-1, keepdim=True)
    if level == "sequence_mean":
        difference = difference / mask.sum(-1, keepdim=True).clamp(min=1)
    return difference.clamp(-FARTHEST, FARTHEST)


def losses(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerCompletion | PerToken,
    mask: Mask,
    level: Level,
    clip: Clip,
    bounds: Bounds,
) -> Losses:
    """The loss of each action.

    Args:
        logps: under the policy being trained.
        old_logps: under the policy that sampled.
        advantages: of tokens only where tokens are actions.
        level: what the ratio is of, see `log_ratio`.
        clip: one of the three losses above; all but `ppo` have a term for each token.
        bounds: of the ratio.
    """
    ratio = log_ratio(logps, old_logps, mask, level).exp()
    actions = mask if level == "token" else torch.ones_like(ratio, dtype=torch.bool)
    weight = advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)
    none = torch.zeros_like(actions)
    if clip == "ppo":
        free = ratio if bounds.delta is None else ratio.clamp(max=bounds.delta)
        bound = ratio.clamp(1 - bounds.epsilon, 1 + bounds.epsilon_high)
        loss = torch.where(actions, -torch.minimum(free * weight, bound * weight), 0.0)
        low, high = (ratio < 1 - bounds.epsilon) & (weight < 0), (ratio > 1 + bounds.epsilon_high) & (weight > 0)
    elif clip == "cispo":
        factor = ratio.detach().clamp(max=1 + bounds.epsilon_high)
        loss = torch.where(mask, -factor * weight * logps, 0.0)
        low, high = none, ratio > 1 + bounds.epsilon_high
    else:
        loss = torch.where(mask, -weight * logps, 0.0)
        low, high = none, none
    count = actions.sum(-1).clamp(min=1)
    return Losses(
        loss,
        (ratio.detach() * actions).sum(-1) / count,
        (low & actions).sum(-1) / count,
        (high & actions).sum(-1) / count,
    )


class Totals(NamedTuple):
    """What an optimizer step's loss is divided by: fixed before the step is cut into micro-batches and processes."""

    completions: int
    tokens: int
    longest: int
    """Tokens of the longest completion that may be, Dr. GRPO's constant."""


def aggregate(parts: PerAction, mask: Mask, mode: AggMode, totals: Totals) -> Scalar:
    """The share of these completions in their optimizer step's loss.

    sequence                      1/N Σ_i Σ_actions          RLOO: an action counts once, however long it is
    token_mean                    1/ΣT Σ_i Σ_t               DAPO (arXiv 2503.14476, equation 8)
    sequence_mean_token_mean      1/N Σ_i 1/T_i Σ_t          GRPO (arXiv 2402.03300, equation 3)
    sequence_mean_token_sum       1/N Σ_i Σ_t
    sequence_mean_token_sum_norm  1/(N L) Σ_i Σ_t            Dr. GRPO (arXiv 2503.20783, section 3.2)

    Args:
        parts: where a completion is one action, each of its tokens carries that loss in the modes that speak of tokens.
    """
    lengths = mask.sum(-1)
    per_completion = parts.sum(-1)
    if parts.shape[-1] == 1 and mode != "sequence":
        per_completion = per_completion * lengths
    if mode == "token_mean":
        return per_completion.sum() / max(1, totals.tokens)
    if mode == "sequence_mean_token_mean":
        per_completion = per_completion / lengths.clamp(min=1)
    elif mode == "sequence_mean_token_sum_norm":
        per_completion = per_completion / totals.longest
    return per_completion.sum() / max(1, totals.completions)
