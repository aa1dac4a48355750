"""The sampler's log-probs against the trainer's: importance weights and how far the two are apart.

Sampler and trainer hold the same weights and still differ: other kernels, other rounding. With w = π_trainer/π_sampler
of a token or of a whole completion, losses are weighted by w truncated (tis) or dropped outside thresholds (mis):
Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Liu et al. 2025, "When speed
kills stability"; TRL's vllm_importance_sampling_mode.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rloo_pipeline.algorithm.shapes import Mask, PerAction, PerCompletion, PerToken, Scalar

Correction = Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"]


def weights(
    logps: PerToken, sampling_logps: PerToken, mask: Mask, correction: Correction, low: float | None, high: float | None
) -> PerAction:
    """What each action's loss is multiplied by, without gradient; for the corrections of tokens 0 outside the mask.

    Args:
        logps: under the trainer, for the weights that sampled.
        sampling_logps: under the sampler.
        low, high: thresholds; None is no threshold.
    """
    if correction == "none":
        return torch.ones_like(logps[:, :1])
    difference = torch.where(mask, logps.detach() - sampling_logps, 0.0)
    actions = mask
    if correction.startswith("sequence"):
        difference, actions = difference.sum(-1, keepdim=True), torch.ones_like(mask[:, :1])
    weight = difference.exp()
    if correction.endswith("tis"):
        weight = weight if low is None else weight.clamp(min=low)
        weight = weight if high is None else weight.clamp(max=high)
    else:
        actions = actions if low is None else actions & (weight >= low)
        actions = actions if high is None else actions & (weight <= high)
    return torch.where(actions, weight, 0.0)


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


def gap(logps: PerToken, sampling_logps: PerToken, mask: Mask) -> Gap:
    """The gap of each completion; arguments as in `weights`."""
    difference = torch.where(mask, logps.detach() - sampling_logps, 0.0)
    size, kl = difference.abs(), difference.expm1() - difference
    return Gap(size.sum(-1), size.amax(-1), kl.sum(-1), difference.sum(-1))


def effective_sample_size(log_weights: PerCompletion) -> Scalar:
    """(Σ w)² / (n Σ w²), in (0, 1]: the share of the samples that the weights leave (Kong 1992)."""
    scaled = (log_weights - log_weights.max()).exp()
    return scaled.sum().square() / (len(scaled) * scaled.square().sum())
