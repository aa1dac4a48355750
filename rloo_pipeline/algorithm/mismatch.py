"""Mismatch between the sampler's log-probs and the trainer's: importance weights, and the size of the gap.

Sampler and trainer differ in kernels and rounding. With `rollout.lag` the sampler also holds an older policy, and the
trainer's is π_old, around which the loss clips (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641). With w =
π_trainer/π_sampler of a token or a whole completion, losses are weighted by truncated w (tis) or dropped outside
thresholds (mis): Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Liu et al.
2025, "When speed kills stability"; TRL's vllm_importance_sampling_mode. token_mis with both thresholds is the two-sided
token mask of IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855).

The weight of a whole completion is a product over its tokens, so in long completions noise alone takes it far from 1.
sequence_mean_mis compares the geometric mean of the tokens' weights with the thresholds instead, and weights the
completions within them by 1, because a geometric mean is not an importance weight (Liu et al. 2025, the geometric
mask).

A correction and a rejection together multiply: W = weight × 1[min ≤ v ≤ max], where v is the weight that the rejection
judges, before any truncation (verl's rollout_is together with rollout_rs).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rloo_pipeline.algorithm.loss import MAX_LOG_RATIO, log_ratio

if TYPE_CHECKING:
    from rloo_pipeline.config.algorithm import RatioLevel
    from rloo_pipeline.config.corrections import Correction

BAND = (0.5, 2.0)
"""Token weights that rounding can explain; a weight outside this band has a different cause."""


class Rejection(NamedTuple):
    """A rule that drops actions if their weight, or that of their completion, is outside the thresholds."""

    by: RatioLevel
    min: float | None
    max: float | None


class Weights(NamedTuple):
    """Effect of a correction on each action."""

    weight: Float[Tensor, "completions actions"]
    """Factor of the action's loss, without gradient; if weights are per token, 0 outside the mask."""
    outside: Bool[Tensor, "completions actions"]
    """True if the weight is beyond a threshold, and is therefore truncated or dropped."""


def weights(
    logps: Float[Tensor, "completions tokens"],
    sampling_logps: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    correction: Correction,
    low: float | None,
    high: float | None,
    rejection: Rejection | None = None,
) -> Weights:
    """The importance weight of each action, bounded as the ratios of losses are.

    Args:
        logps: log-probs under the trainer, with the policy before the update.
        sampling_logps: log-probs under the sampler.
        mask: True for completion tokens.
        correction: the kind of correction.
        low: lower threshold of the weight; None for no threshold.
        high: upper threshold of the weight; None for no threshold.
        rejection: a second rule, which drops actions.
    """
    weight, outside = _corrected(logps, sampling_logps, mask, correction, low, high)
    by_token = correction.startswith("token")
    if rejection is not None:
        judged = log_ratio(logps.detach(), sampling_logps, mask, rejection.by).exp()
        by_token = by_token or rejection.by == "token"
        rejected = _is_outside(judged, rejection.min, rejection.max)
        weight, outside = torch.where(rejected, 0.0, weight), outside | rejected
    actions = mask if by_token else torch.ones_like(mask[:, :1])
    return Weights(torch.where(actions, weight, 0.0), actions & outside)


def _corrected(
    logps: Tensor, sampling_logps: Tensor, mask: Tensor, correction: Correction, low: float | None, high: float | None
) -> tuple[Tensor, Tensor]:
    """Weights of one correction, also outside of the mask; and True where they are beyond a threshold."""
    level: RatioLevel = correction.rpartition("_")[0]  # type: ignore[assignment]  # the name before tis or mis
    weight = log_ratio(logps.detach(), sampling_logps, mask, level).exp()
    outside = _is_outside(weight, low, high)
    if correction.endswith("tis"):
        return weight.clamp(-math.inf if low is None else low, math.inf if high is None else high), outside
    inside = torch.ones_like(weight) if correction == "sequence_mean_mis" else weight
    return torch.where(outside, 0.0, inside), outside


def _is_outside(weight: Tensor, low: float | None, high: float | None) -> Tensor:
    return (weight < (-math.inf if low is None else low)) | (weight > (math.inf if high is None else high))


class Gap(NamedTuple):
    """Difference between trainer and sampler on each completion."""

    absolute: Float[Tensor, " completions"]
    """Σ_t |log π_trainer − log π_sampler|."""
    largest: Float[Tensor, " completions"]
    """max_t |log π_trainer − log π_sampler|."""
    kl: Float[Tensor, " completions"]
    """Σ_t of the k3 estimate of KL(sampler‖trainer), in nats."""
    log_weight: Float[Tensor, " completions"]
    """Σ_t (log π_trainer − log π_sampler): log of the completion's importance weight."""
    outside: Int[Tensor, " completions"]
    """Number of tokens whose weight is outside `BAND`."""
    weight: Float[Tensor, " completions"]
    """Σ_t w_t, the importance weights of its tokens."""
    weight_square: Float[Tensor, " completions"]
    """Σ_t w_t²."""


def gap(
    logps: Float[Tensor, "completions tokens"],
    sampling_logps: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
) -> Gap:
    """The gap of each completion in float64; arguments as in `weights`."""
    difference = torch.where(mask, (logps.detach() - sampling_logps).double(), 0.0)
    size, kl = difference.abs(), difference.expm1() - difference
    outside = (difference < math.log(BAND[0])) | (difference > math.log(BAND[1]))
    weight = torch.where(mask, difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    return Gap(
        size.sum(-1),
        size.amax(-1),
        kl.sum(-1),
        difference.sum(-1),
        outside.sum(-1),
        weight.sum(-1),
        weight.square().sum(-1),
    )


def effective_sample_size(log_weights: Float[Tensor, " completions"]) -> Float[Tensor, ""]:
    """(Σ w)² / (n Σ w²), in (0, 1]: effective sample size as a share of n (Kong 1992)."""
    scaled = (log_weights - log_weights.max()).exp()
    return scaled.sum().square() / (len(scaled) * scaled.square().sum())
