"""The share of a card's peak that an update reaches: the FLOPs that its model needs per second, over the vendor's.

The model needs, for each token, products with the weights of all layers and attention to the earlier tokens of its
sequence, and for each completion token the head. That is 2 FLOPs per weight and token in a forward pass, as many for
the gradients of activations, and as many for those of weights. The samples of a prompt share its tokens. Recomputed
activations and padding do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run.cards import CARDS
from rloo_pipeline.runtime import devices

if TYPE_CHECKING:
    from rloo_pipeline.config import Config


def of_update(
    config: Config, policy: Policy, prompts: Sequence[int], completions: Sequence[int], seconds: float, cards: int
) -> str:
    """A clause for the line of an update, such as ", 0.31 of the peak of 1 NVIDIA H200"; empty if unknown.

    Args:
        config: the run's configuration.
        policy: the policy, or an adapter with its base.
        prompts: tokens of the prompt of each completion.
        completions: tokens of each completion, K consecutive ones per prompt; 0 for those that skip the model.
        seconds: of the update's optimizer steps.
        cards: number of cards.
    """
    if config.model.dtype == "float32" or not (flops := peak(card := devices.card())):
        return ""
    needed = _needed(config, policy, prompts, completions)
    return f", {needed / seconds / flops / cards:.2f} of the peak of {cards} {card}" if needed else ""


def peak(card: str) -> float | None:
    """Dense 16-bit FLOPs per second of a card, from the vendor's data sheet; None if unknown, or for a MIG slice.

    Hopper cards for PCIe ("H100 PCIe", "H200 NVL") are slower than those on SXM boards, which CARDS has.
    """
    words = re.split(r"[^a-z0-9.]+", card.lower().replace("rtx ", "rtx"))
    if any(re.match(r"\dg\.", word) for word in words) or "nvl" in words or {"h100", "pcie"} <= {*words}:
        return None
    return next((CARDS[word].teraflops * 1e12 for word in words if word in CARDS), None)


def forward(
    layers: int, attention: int, head: int, prompts: Sequence[int], completions: Sequence[int], samples: int
) -> int:
    """FLOPs of a forward pass.

    Args:
        layers: weights in the matrices of all layers.
        attention: width of all query heads, times the number of layers.
        head: weights in the vocabulary projection.
        prompts: tokens of the prompt of each completion.
        completions: tokens of each completion, grouped by prompt.
        samples: number of completions that share a prompt's tokens.
    """
    firsts = range(0, len(prompts), samples)
    shared = [prompts[first] for first in firsts if any(completions[first : first + samples])]
    tokens, pairs = sum(shared) + sum(completions), sum(map(_triangle, shared))
    pairs += sum(_triangle(a + b) - _triangle(a) for a, b in zip(prompts, completions, strict=True))
    return 2 * layers * tokens + 4 * attention * pairs + 2 * head * sum(completions)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _needed(config: Config, policy: Policy, prompts: Sequence[int], completions: Sequence[int]) -> int | None:
    """FLOPs of an update; None for models whose cost per token this module does not know."""
    dims = policy.dimensions
    if dims is None or policy.image_kind or policy.has_experts or policy.is_recurrent:
        return None
    head = dims.vocabulary * dims.hidden
    layers = dims.parameters - head * (1 if model_dims.is_tied(policy.config) else 2)
    algorithm, passes = config.algorithm, 3 if config.update.lora is None else 2  # a base has no gradients
    passes = algorithm.num_iterations * passes + algorithm.needs_old_pass
    shared = config.rollout.num_generations
    return passes * forward(layers, dims.layers * dims.heads, head, prompts, completions, shared)
