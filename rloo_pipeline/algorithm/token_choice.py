"""Tokens that a round's losses leave out or hold back, chosen over all tokens of the round before its first step.

N is their number, H_t the entropy of π_old at token t, A_t its advantage, and r and q are shares:

    top entropy   keeps H_t ≥ the (1 − q) quantile of H    (Wang et al. 2025, arXiv 2506.01939; TRL's
                                                            top_entropy_quantile)
    covariance    C_t = (A_t − mean A) (log π_old(t) − mean log π_old)
    clip_cov      drops max(1, ⌊rN⌋) tokens, drawn from those with low < C_t < high
    kl_cov        holds the max(1, ⌊rN⌋) tokens of largest C_t near π_old

The last three are Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617) as in verl's core_algos.py. TRL and verl
choose tokens in each micro-batch, by the current policy; here they are chosen once per round, so the choice does not
depend on how a step is split. Before the first step both policies are the same.
"""

import random

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor


def top_entropy(
    entropies: Float[Tensor, "completions tokens"], mask: Bool[Tensor, "completions tokens"], share: float
) -> Bool[Tensor, "completions tokens"]:
    """True for tokens that are kept. A quantile between two entropies is interpolated linearly.

    Args:
        entropies: entropies of π_old, in nats.
        mask: True for tokens to choose from.
        share: q, the share of tokens to keep.
    """
    values = entropies.double().numpy()[mask.numpy()]
    threshold = np.quantile(values, 1 - share) if len(values) else 0.0
    return mask & (entropies.double() >= float(threshold))


def clip_cov(
    advantages: Float[Tensor, " completions"] | Float[Tensor, "completions tokens"],
    old_logps: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    share: float,
    low: float,
    high: float,
    seed: int,
) -> Bool[Tensor, "completions tokens"]:
    """True for tokens that are dropped.

    Args:
        advantages: advantages of completions or tokens.
        old_logps: log π_old.
        mask: True for tokens to choose from.
        share: r, the share of tokens to drop.
        low: covariance above which tokens can be dropped.
        high: covariance below which tokens can be dropped.
        seed: seed of the draw.
    """
    values = _covariances(advantages, old_logps, mask)
    between = np.flatnonzero((values > low) & (values < high))
    drawn = random.Random(seed).sample(between.tolist(), min(len(between), _count(share, values)))
    return _mask_at(mask, np.array(drawn, np.int64))


def kl_cov(
    advantages: Float[Tensor, " completions"] | Float[Tensor, "completions tokens"],
    old_logps: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    share: float,
) -> Bool[Tensor, "completions tokens"]:
    """True for tokens that are held near π_old; on ties, the first. The arguments are the same as for `clip_cov`."""
    values = _covariances(advantages, old_logps, mask)
    return _mask_at(mask, np.argsort(-values, kind="stable")[: _count(share, values)])


def _covariances(advantages: Tensor, old_logps: Tensor, mask: Tensor) -> NDArray[np.float64]:
    """C_t of the tokens in the mask, row by row."""
    each = advantages if advantages.dim() == 2 else advantages.unsqueeze(-1).expand_as(mask)
    deviations = (values.double().numpy()[mask.numpy()] for values in (each, old_logps))
    of_advantages, of_logps = (values - values.mean() if len(values) else values for values in deviations)
    result: NDArray[np.float64] = of_advantages * of_logps
    return result


def _count(share: float, values: NDArray[np.float64]) -> int:
    return min(len(values), max(1, int(share * len(values))))


def _mask_at(mask: Tensor, positions: NDArray[np.int64]) -> Tensor:
    """A mask that is true at these positions among the tokens of `mask`."""
    chosen = torch.zeros(int(mask.sum()), dtype=torch.bool)
    chosen[torch.from_numpy(positions)] = True
    return torch.zeros_like(mask).masked_scatter(mask, chosen)
