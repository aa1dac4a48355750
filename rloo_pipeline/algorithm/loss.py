"""Policy-gradient losses of actions, and their aggregation.

An action is a whole completion (RLOO: Ahmadian et al. 2024, section 2.2) or a token. With ρ = π_θ/π_old of an action,
its loss is

    ppo     −min(ρA, clip(ρ, 1−ε, 1+ε_high)A), where A < 0 at least −δA   (arXiv 1707.06347, equation 7; 1912.09729)
    cispo   −sg[min(ρ, 1+ε_high)] A log π_θ                               (arXiv 2506.13585, equation 5)
    sapo    −(4/τ) σ(τ(ρ − 1)) A, τ by the sign of A                      (arXiv 2511.20347; TRL's loss_type: sapo)
    dppo_tv −sg[min(ρ, 20)] A log π_θ, 0 where A > 0 and π_θ − π_old > ε_high, or A ≤ 0 and π_θ − π_old < −ε
                                                                          (arXiv 2602.04879, Binary-TV; verl's dppo_tv)
    vespo   −sg[e^(λ(1−w)) w^k] A log π_θ, w = Π_t ρ_t of the completion, k and λ by the sign of A
                                                                          (arXiv 2602.10693; TRL's loss_type: vespo)
    clip_cov ppo's, and 0 on the tokens of `token_choice.clip_cov`        (arXiv 2505.22617; verl's clip_cov)
    kl_cov  −ρA, and + κ |log ρ| on the tokens of `token_choice.kl_cov`   (the same; verl's kl_cov)
    none    −A log π_θ                                                    (Williams 1992)

At ρ = 1, in the first step on samples of π_old, all have the gradient of `none` (ppo at `sequence_mean`: 1/T of it).

Shapes: `actions` is 1 where a completion is one action, and the number of tokens otherwise. The mask is True for a
completion's tokens, and log-probs are 0 at padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from rloo_pipeline.config.algorithm import Clip, LossAggMode, RatioLevel


OwnLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A user's loss: logps, old_logps, advantages and mask, all [completions, tokens] → the loss of each token. Completions
and tokens outside of the mask must not affect others, since steps are split into micro-batches.
"""
MAX_LOG_RATIO = 20.0
"""Bound on a log-ratio, as in OpenRLHF, verl and NeMo-RL; a ratio of e²⁰ = 4.9e8 is far outside any clip range."""


LEAST_LOG_WEIGHT = math.log(1e-8)
"""Lower bound on a completion's log-ratio in `vespo`, as in its authors' code and TRL; see also `MAX_LOG_RATIO`."""
MOST_OFF_POLICY = 20.0
"""Bound on a ratio in `dppo_tv`, as in verl: its trust region bounds differences of probabilities, not ratios."""


class Bounds(NamedTuple):
    """The clip range of a ratio, or of a difference of probabilities (`dppo_tv`), and the parameters of `sapo` and
    `vespo`.
    """

    epsilon: float
    epsilon_high: float
    delta: float | None = None
    temperature_pos: float = 1.0
    temperature_neg: float = 1.05
    gamma_pos: tuple[float, float] = (2.0, 3.0)
    """k and λ of `vespo` for advantages that are not negative."""
    gamma_neg: tuple[float, float] = (3.0, 2.0)
    kl_cov_coef: float = 1.0
    """κ of `kl_cov`."""


class Losses(NamedTuple):
    """The loss of each action and the effect of the clip; all but the loss are detached."""

    loss: Float[Tensor, "completions actions"]
    """0 outside the mask; a completion that is one action and outside of it adds a constant, as in TRL."""
    ratio: Float[Tensor, " completions"]
    """ρ; at token level the mean over the completion's tokens."""
    low: Float[Tensor, " completions"]
    """Share of actions without a gradient because ρ < 1 − ε, or π_θ − π_old < −ε."""
    high: Float[Tensor, " completions"]
    """Share of actions without a gradient because ρ > 1 + ε_high, or π_θ − π_old > ε_high (CISPO: with a cut weight),
    or because `clip_cov` drops them.
    """


def log_ratio(
    logps: Float[Tensor, "completions tokens"],
    old_logps: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    level: RatioLevel,
) -> Float[Tensor, "completions actions"]:
    """log ρ of each action, bounded by ±20: an infinite ratio times an advantage of 0 would be NaN.

    Args:
        logps: log-probs under the policy being trained.
        old_logps: log-probs under π_old: the policy before the update, or the one that sampled (`old_logps: sampler`).
        mask: True for completion tokens.
        level: `sequence` sums over tokens (RLOO), `sequence_mean` takes their mean (GSPO, arXiv 2507.18071,
            equation 7), `token` makes each token an action (PPO, GRPO).
    """
    difference = torch.where(mask, logps - old_logps, 0.0)
    if level != "token":
        difference = difference.sum(-1, keepdim=True)
    if level == "sequence_mean":
        difference = difference / mask.sum(-1, keepdim=True).clamp(min=1)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def losses(
    logps: Float[Tensor, "completions tokens"],
    old_logps: Float[Tensor, "completions tokens"],
    advantages: Float[Tensor, " completions"] | Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    level: RatioLevel,
    clip: Clip | OwnLoss,
    bounds: Bounds,
    chosen: Bool[Tensor, "completions tokens"] | None = None,
) -> Losses:
    """The loss of each action.

    Args:
        logps: log-probs under the policy being trained.
        old_logps: log-probs under π_old: the policy before the update, or the one that sampled (`old_logps: sampler`).
        advantages: per completion, or per token if tokens are actions.
        mask: True for completion tokens.
        level: kind of action, see `log_ratio`.
        clip: one of the losses above, or a user's; all but `ppo` have a term for each token.
        bounds: clip range of the ratio.
        chosen: tokens that `clip_cov` drops or `kl_cov` holds back; None if there are none.
    """
    difference = log_ratio(logps, old_logps, mask, level)
    ratio = difference.exp()
    actions = mask if level == "token" else torch.ones_like(ratio, dtype=torch.bool)
    weight = advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)
    low = high = torch.zeros_like(actions)
    if clip in ("ppo", "clip_cov"):
        unclipped = ratio if bounds.delta is None else ratio.clamp(max=bounds.delta)
        clipped = ratio.clamp(1 - bounds.epsilon, 1 + bounds.epsilon_high)
        loss = torch.where(actions, -torch.minimum(unclipped * weight, clipped * weight), 0.0)
        low, high = (ratio < 1 - bounds.epsilon) & (weight < 0), (ratio > 1 + bounds.epsilon_high) & (weight > 0)
        if chosen is not None:
            loss, low, high = torch.where(chosen, 0.0, loss), low & ~chosen, high | chosen
    elif clip == "kl_cov":
        held = 0.0 if chosen is None else bounds.kl_cov_coef * chosen * difference.abs()
        loss = torch.where(actions, -ratio * weight + held, 0.0)
    elif clip == "cispo":
        factor = ratio.detach().clamp(max=1 + bounds.epsilon_high)
        loss = torch.where(mask, -factor * weight * logps, 0.0)
        high = ratio > 1 + bounds.epsilon_high
    elif clip == "sapo":
        temperature = torch.where(weight > 0, bounds.temperature_pos, bounds.temperature_neg)
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        loss = torch.where(actions, -gate * weight, 0.0)
    elif clip == "dppo_tv":
        moved = logps.detach().exp() - old_logps.exp()
        low, high = (moved < -bounds.epsilon) & (weight <= 0), (moved > bounds.epsilon_high) & (weight > 0)
        factor = ratio.detach().clamp(max=MOST_OFF_POLICY)
        loss = torch.where(mask & ~low & ~high, -factor * weight * logps, 0.0)
    elif clip == "vespo":
        loss = torch.where(mask, -_gamma_weight(logps.detach() - old_logps, weight, mask, bounds) * weight * logps, 0.0)
    else:
        own = clip(logps, old_logps, weight.expand_as(logps), mask) if callable(clip) else -weight * logps
        loss = torch.where(mask, own, 0.0)
    count = actions.sum(-1).clamp(min=1)
    return Losses(
        loss,
        (ratio.detach() * actions).sum(-1) / count,
        (low & actions).sum(-1) / count,
        (high & actions).sum(-1) / count,
    )


def _gamma_weight(difference: Tensor, advantages: Tensor, mask: Tensor, bounds: Bounds) -> Tensor:
    """VESPO's weight e^(λ(1−w)) w^k of a completion's ratio w, [completions, 1], or [completions, tokens] if advantages
    are; 1 at w = 1.
    """
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = torch.where(mask, bounded, 0.0).sum(-1, keepdim=True).clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)
    k, rate = (torch.where(advantages >= 0, *pair) for pair in zip(bounds.gamma_pos, bounds.gamma_neg, strict=True))
    return (rate + k * log_w - rate * log_w.exp()).exp()


class Totals(NamedTuple):
    """Denominators of an optimizer step's loss, fixed before the step is split into micro-batches and over ranks."""

    completions: int
    tokens: int
    longest: int
    """max_completion_length in tokens, Dr. GRPO's constant."""


def aggregate(
    action_losses: Float[Tensor, "completions actions"],
    mask: Bool[Tensor, "completions tokens"],
    mode: LossAggMode,
    totals: Totals,
) -> Float[Tensor, ""]:
    """The share of these completions in the loss of their optimizer step.

    sequence                      1/N Σ_i Σ_actions          RLOO: an action counts once, whatever its length
    token_mean                    1/ΣT Σ_i Σ_t               DAPO (arXiv 2503.14476, equation 8)
    sequence_mean_token_mean      1/N Σ_i 1/T_i Σ_t          GRPO (arXiv 2402.03300, equation 3)
    sequence_mean_token_sum       1/N Σ_i Σ_t
    sequence_mean_token_sum_norm  1/(N L) Σ_i Σ_t            Dr. GRPO (arXiv 2503.20783, section 3.2)

    Args:
        action_losses: 0 outside the mask. If a completion is one action, modes that sum over tokens count its loss once
            per token.
        mask: True for completion tokens.
        mode: one of the five above.
        totals: N, ΣT and L of the optimizer step.
    """
    lengths = mask.sum(-1)
    per_completion = action_losses.sum(-1)
    if action_losses.shape[-1] == 1 and mode != "sequence":
        per_completion = per_completion * lengths
    if mode == "token_mean":
        return per_completion.sum() / max(1, totals.tokens)
    if mode == "sequence_mean_token_mean":
        per_completion = per_completion / lengths.clamp(min=1)
    elif mode == "sequence_mean_token_sum_norm":
        per_completion = per_completion / totals.longest
    return per_completion.sum() / max(1, totals.completions)
