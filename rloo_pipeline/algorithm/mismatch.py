"""The sampler's log-probs against the trainer's: importance weights and how far the two are apart.

Sampler and trainer hold the same weights and still differ: other kernels, other rounding. With w = π_trainer/π_sampler
of a token or of a whole completion, losses are weighted by w truncated (tis) or dropped outside thresholds (mis):
Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Liu et al. 2025, "When speed
kills stability"; TRL's vllm_importance_sampling_mode. token_mis with both thresholds is the two-sided token mask of
IcePop (Ling team 2025, "Every step evolves", arXiv 2510.18855).

The weight of a whole completion is a product over its tokens, so noise alone takes it far from 1 where completions are
long. sequence_mean_mis judges a completion by the geometric mean of its tokens' weights instead, drops it where that
leaves the thresholds, and weighs what it keeps by 1: a geometric mean is no importance weight (Liu et al. 2025, the
geometric mask).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from rloo_pipeline.algorithm.loss import FARTHEST
from rloo_pipeline.algorithm.shapes import Mask, PerAction, PerCompletion, PerToken, Scalar

Correction = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "sequence_mean_mis"]
BAND = (0.5, 2.0)
"""Weights of a token that are no noise of a number format when they are outside."""


class Weights(NamedTuple):
    """What a correction makes of each action."""

    weight: PerAction
    """What its loss is multiplied by, without gradient; for the corrections of tokens 0 outside the mask."""
    outside: PerAction
    """bool: beyond a threshold, so truncated or dropped."""


def weights(
    logps: PerToken, sampling_logps: PerToken, mask: Mask, correction: Correction, low: float | None, high: float | None
) -> Weights:
    """The importance weight of each action under a correction. Its logarithm is bounded by ±20 as a ratio's is: a
    weight of infinity would make NaN of a loss of 0.

    Args:
        logps: under the trainer, for the weights that sampled.
        sampling_logps: under the sampler.
        low, high: thresholds; None is no threshold.
    """
    difference = torch.where(mask, logps.detach() - sampling_logps, 0.0)
    actions = mask
    if not correction.startswith("token"):
        difference, actions = difference.sum(-1, keepdim=True), torch.ones_like(mask[:, :1])
    if correction == "sequence_mean_mis":
        difference = difference / mask.sum(-1, keepdim=True).clamp(min=1)
    weight = difference.clamp(-FARTHEST, FARTHEST).exp()
    outside = torch.zeros_like(actions)
    if correction == "none":
        return Weights(torch.ones_like(weight), outside)
    if low is not None:
        outside = outside | (actions & (weight < low))
    if high is not None:
        outside = outside | (actions & (weight > high))
    if correction.endswith("tis"):
        weight = weight if low is None else weight.clamp(min=low)
        weight = weight if high is None else weight.clamp(max=high)
        return Weights(torch.where(actions, weight, 0.0), outside)
    kept = torch.ones_like(weight) if correction == "sequence_mean_mis" else weight
    return Weights(torch.where(actions & ~outside, kept, 0.0), outside)


class Gap(NamedTuple):
    """How far apart the two are on each completion."""

    absolute: PerCompletion
    """Σ_t |log π_trainer − log π_sampler|."""
    largest: PerCompletion
    """Its largest token."""
    kl: PerCompletion
    """Σ_t of the k3 estimate of KL(sampler‖trainer), nats."""
    log_weight: PerCompletion
    """Σ_t (log π_trainer − log π_sampler): log of the completion's importance weight."""
    outside: PerCompletion
    """Number of its tokens whose weight is outside `BAND`."""


def gap(logps: PerToken, sampling_logps: PerToken, mask: Mask) -> Gap:
    """The gap of each completion, [completions] float64; arguments as in `weights`."""
    difference = torch.where(mask, (logps.detach() - sampling_logps).double(), 0.0)
    size, kl = difference.abs(), difference.expm1() - difference
    outside = (difference < math.log(BAND[0])) | (difference > math.log(BAND[1]))
    return Gap(size.sum(-1), size.amax(-1), kl.sum(-1), difference.sum(-1), outside.sum(-1))


def effective_sample_size(log_weights: PerCompletion) -> Scalar:
    """(Σ w)² / (n Σ w²), in (0, 1]: the share of the samples that the weights leave (Kong 1992)."""
    scaled = (log_weights - log_weights.max()).exp()
    return scaled.sum().square() / (len(scaled) * scaled.square().sum())
