"""Logits [tokens, vocabulary]: the formula by which a model makes them, and functions of their rows."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Form(NamedTuple):
    """Formula of logits from products z: scale · z, or with a cap, cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    """Granite: 1 / logits_scaling; Cohere: logit_scale."""
    cap: float = inf
    """Gemma 2: final_logit_softcapping."""

    def logits(self, products: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The logits of these products."""
        scaled = products * self.scale
        return scaled if self.cap == inf else (scaled / self.cap).tanh() * self.cap


class Top(NamedTuple):
    """Log-probs of the completion tokens, and the likeliest tokens at their positions, in float32."""

    logps: Float[Tensor, " completion_tokens"]
    top_logps: Float[Tensor, "completion_tokens K"]
    """Largest first."""
    top_ids: Int[Tensor, "completion_tokens K"]


def top_of(logits: Tensor, at_targets: Tensor, normalizers: Tensor, count: int) -> Top:
    """The likeliest tokens of logits [tokens, vocabulary], with log Σ exp of each row."""
    largest, ids = logits.topk(count, -1)
    return Top(at_targets - normalizers, largest - normalizers.unsqueeze(-1), ids)


def exponentials(logits: Tensor, probs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """max z and Σ exp(z − max z)·(z − max z) of some tokens.

    Writes exp(z − max z) into `probs` and its sum into `sums`, and overwrites `logits`.
    """
    largest = logits.amax(-1, keepdim=True)
    torch.exp(logits.sub_(largest), out=probs)
    torch.sum(probs, -1, keepdim=True, out=sums)
    return largest.squeeze(-1), logits.mul_(probs).sum(-1)
