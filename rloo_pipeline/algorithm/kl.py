"""Estimates of KL(π‖π_ref) from the log-probs of sampled tokens (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from torch import Tensor


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """log π − log π_ref: unbiased when sampled from π. Elementwise; it may be negative, and must not be 'repaired'."""
    return logps - reference_logps


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """π_ref/π − 1 − log(π_ref/π): unbiased as a value and never negative. Biased when used inside a reward.
    Elementwise.
    """
    log_ratio = reference_logps - logps
    return log_ratio.expm1() - log_ratio


def sequence_k1(logps: Tensor, reference_logps: Tensor, mask: Tensor) -> Tensor:
    """KL_i = Σ_t (log π − log π_ref) over a completion's tokens: the KL that RLOO puts into the reward.

    Args:
        logps, reference_logps: [completions, tokens].
        mask: [completions, tokens] bool, true on the completion's tokens.

    Returns:
        [completions].
    """
    return (k1(logps, reference_logps) * mask).sum(-1)
