"""KL(π‖π_ref) from the log-probs of sampled tokens, its reward-to-go, and the controller of β.

The estimates k1, k2 and k3 are those of Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from rloo_pipeline.config.corrections import KlEstimator


def k1(logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log π − log π_ref: unbiased on samples of π. It may be negative; do not clamp it.

    In a reward, its gradient is that of the KL of completions. In a loss, its gradient is ∇ log π, which averages 0
    if tokens are summed; a mean over each completion's T tokens leaves ∇E[1/T]. Neither regularizes anything.
    Multiplied by the ratio (`kl.bias_correction`), it has the gradient of `k3`.
    """
    return logps - reference_logps


def k2(logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """½ (log π − log π_ref)²: biased as a value.

    Summed in a loss, on samples of π, its gradient is that of the next token's KL(π‖π_ref) with prefixes held fixed.
    It ignores how a token changes the KL of later ones.
    """
    return 0.5 * (logps - reference_logps).square()


def k3(logps: Float[Tensor, "*shape"], reference_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """π_ref/π − 1 − log(π_ref/π), used by GRPO: unbiased as a value and never negative.

    Summed in a loss, its gradient is that of the next token's KL(π_ref‖π), the other direction; multiplied by the ratio
    (`kl.bias_correction`), that of KL(π‖π_ref).
    """
    log_ratio = reference_logps - logps
    return log_ratio.expm1() - log_ratio


def estimate(
    name: KlEstimator,
    logps: Float[Tensor, "*batch tokens"],
    reference_logps: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
) -> Float[Tensor, "*batch tokens"]:
    """The estimate of each token in nats, 0 outside the mask; the sum over tokens is the KL of the completion."""
    function = {"k1": k1, "k2": k2, "k3": k3}[name]
    return torch.where(mask, function(logps, reference_logps), 0.0)


def reward_to_go(values: Float[Tensor, "*batch tokens"], discount: float = 1.0) -> Float[Tensor, "*batch tokens"]:
    """Σ_{t' ≥ t} γ^(t' − t) of the tokens' values, for each token t; γ is the discount."""
    if discount == 1:
        return values.flip(-1).cumsum(-1).flip(-1)
    result = values.clone()
    if discount:
        for token in range(values.shape[-1] - 2, -1, -1):
            result[..., token] += discount * result[..., token + 1]
    return result


def adapt_beta(beta: float, kl: float, target: float, gain: float) -> float:
    """The next β: β · (1 + gain · clip(KL/target − 1, −0.2, 0.2)).

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, where gain is K_β = 0.1.

    Args:
        beta: the current β.
        kl: mean KL of a completion, in nats.
        target: desired KL of a completion, in nats.
        gain: K_β.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return beta * (1 + gain * error)
