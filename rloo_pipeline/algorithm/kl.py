"""KL(π‖π_ref) from the log-probs of sampled tokens: estimates (Schulman, "Approximating KL divergence", 2020), their
reward-to-go, and the controller that steers β.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rloo_pipeline.algorithm.shapes import Mask, PerToken

Estimator = Literal["k1", "k2", "k3"]


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """log π − log π_ref: unbiased when sampled from π. Elementwise; it may be negative, and must not be 'repaired'.

    In a loss its gradient is ∇ log π, which is 0 on average: it regularizes nothing there.
    """
    return logps - reference_logps


def k2(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """½ (log π − log π_ref)²: biased as a value; in a loss, on samples of π, its gradient is that of the KL.
    Elementwise.
    """
    return 0.5 * (logps - reference_logps).square()


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """π_ref/π − 1 − log(π_ref/π): unbiased as a value and never negative; GRPO's. Biased when used inside a reward.
    Elementwise.
    """
    log_ratio = reference_logps - logps
    return log_ratio.expm1() - log_ratio


def estimate(name: Estimator, logps: PerToken, reference_logps: PerToken, mask: Mask) -> PerToken:
    """The estimate of each token, 0 outside the mask; summed over tokens it is the KL of the whole completion."""
    function = {"k1": k1, "k2": k2, "k3": k3}[name]
    return torch.where(mask, function(logps, reference_logps), 0.0)


def to_go(tokens: PerToken) -> PerToken:
    """Σ_{t' ≥ t} of each token's value: what is still to come from there."""
    return tokens.flip(-1).cumsum(-1).flip(-1)


def steered(beta: float, kl: float, target: float, gain: float) -> float:
    """The next β: β · (1 + gain · clip(KL/target − 1, −0.2, 0.2)).

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, where gain is K_β = 0.1.

    Args:
        kl: of a completion, in nats.
        target: what it is to be, in nats.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return beta * (1 + gain * error)
