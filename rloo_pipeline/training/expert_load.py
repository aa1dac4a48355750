"""Measures how a mixture of experts spreads its tokens in the forward passes of a round's optimizer steps.

A token counts once for each pass over the completions. Passes for old log-probs do not count, nor do layers that run
again in the backward pass, nor repeated steps. Tokens of a prompt count once for each micro-batch that has them, and
padding counts where a model trains in padded batches.

If a layer sends n_e tokens to expert e, the share of an expert is p_e = n_e / Σ n, and the entropy of the layer is
−Σ p_e·log p_e / log E: 1 if all E experts get the same number, 0 if one gets everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rloo_pipeline.runtime import devices
from rloo_pipeline.transformers_internals.loaded_model import experts_argument, takes_experts

if TYPE_CHECKING:
    from rloo_pipeline.training.metrics import Metrics


class ExpertLoad:
    """Counts the tokens that each expert layer sends to each expert."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Hooks the expert layers; a model without any has no metrics."""
        self.counts: list[Tensor] = []
        self.counts_now = False
        """True for forward passes that are counted."""
        for layer in filter(takes_experts, model.modules()):
            self._watch(layer, experts_argument(layer))

    def _watch(self, layer: Any, name: str) -> None:
        layer_index, parameters = len(self.counts), inspect.signature(layer.forward)
        self.counts.append(torch.zeros(int(layer.num_experts), dtype=torch.float64))

        def count(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not self.counts_now:
                return
            chosen = parameters.bind(*args, **named).arguments[name]
            most = len(self.counts[layer_index])
            counts = devices.moved(self.counts[layer_index], chosen.device)  # on the GPU from the first pass on
            bins = chosen.flatten().clamp(max=most).long()  # the last bin is for ids that are not an expert's
            padded = counts.new_zeros(most + 1).scatter_add_(0, bins, torch.ones_like(bins, dtype=counts.dtype))
            self.counts[layer_index] = counts + padded[:most]

        layer.register_forward_pre_hook(count, with_kwargs=True)

    def reset(self) -> None:
        """Sets the counts to 0."""
        for counts in self.counts:
            counts.zero_()

    def metrics(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> Metrics:
        """The metrics of the layer whose load is the least even; every rank takes part.

        Args:
            sum_over_ranks: sums a tensor over the ranks.

        Returns:
            `experts/largest_share` and `experts/entropy`; nothing for a model without experts.
        """
        shares = [total / total.sum() for counts in self.counts if (total := sum_over_ranks(counts)).sum() > 0]
        if not shares:
            return {}
        worst = min(shares, key=_entropy)
        return {"experts/largest_share": float(worst.max()), "experts/entropy": _entropy(worst)}


def _entropy(share: Tensor) -> float:
    """The entropy of a layer, given the share of each expert."""
    return float(-(share * share.clamp(min=1e-30).log()).sum()) / log(max(2, len(share)))
