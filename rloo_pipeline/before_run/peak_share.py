"""Model FLOPs utilization of an update: the FLOPs that its model needs per second, relative to the vendor's peak.

Each token needs products with the weights of all layers and attention to the earlier tokens of its sequence; each
completion token also needs the head. That is 2 FLOPs per weight and token in a forward pass, as many for the gradients
of activations, and as many for those of weights. Samples of a prompt share its tokens. Recomputed activations and
padding do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run.cards import CARDS
from rloo_pipeline.runtime import devices

if TYPE_CHECKING:  # tools/bench/gpu.py runs without pydantic
    from rloo_pipeline.config import Config


def of_update(
    config: Config, policy: Policy, prompts: Sequence[int], completions: Sequence[int], seconds: float, cards: int
) -> str:
    """A clause for the log line of an update, such as ", 0.31 of the peak of 1 NVIDIA H200"; empty if unknown.

    Args:
        config: the run's configuration.
        policy: a policy, or an adapter with its base.
        prompts: number of prompt tokens for each completion.
        completions: completion tokens, K consecutive entries per prompt; 0 for those that skip the model.
        seconds: duration of the update's optimizer steps.
        cards: number of cards.
    """
    if config.model.dtype == "float32" or not (flops := peak(card := devices.card())):
        return ""
    needed = _needed(config, policy, prompts, completions)
    return f", {needed / seconds / flops / cards:.2f} of the peak of {cards} {card}" if needed else ""


def peak(card: str) -> float | None:
    """A card's dense 16-bit FLOPs per second, from the vendor's data sheet; None if unknown, or for a MIG slice.

    PCIe versions of Hopper cards ("H100 PCIe", "H200 NVL") are slower than the SXM versions in CARDS.
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
        layers: number of weights in the matrices of all layers.
        attention: width of all query heads, times the number of layers.
        head: number of weights in the vocabulary projection.
        prompts: number of prompt tokens for each completion.
        completions: completion tokens, grouped by prompt.
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
    # the base of an adapter gets no gradients
    algorithm, passes = config.algorithm, 3 if config.update.lora is None else 2
    passes = algorithm.num_iterations * passes + algorithm.needs_old_pass
    shared = config.rollout.num_generations
    return passes * forward(layers, dims.layers * dims.heads, head, prompts, completions, shared)
