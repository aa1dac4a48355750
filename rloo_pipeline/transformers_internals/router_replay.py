"""Trains mixtures of experts with the experts that the sampler chose (routing replay, Ma et al. 2025, R3).

Near a tie, the trainer's router and vLLM's may choose different experts, since their sums round differently. The
token's log-probs then differ by much more than rounding. With replay, the forward pass uses the sampler's experts.
Their weights still come from the trainer's own router, so the router gets its gradient.

A transformers router chooses experts by one call of `torch.topk` on their scores. This module replaces that call.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices, guard
from rloo_pipeline.transformers_internals.loaded_model import takes_experts

ROUTER = re.compile(r"(^|\.)layers\.(\d+)\..*TopKRouter$")
"""Matches a router: its module name, followed by its class name."""


class RouterReplay:
    """The routers of a model. They choose experts themselves until `use` sets them."""

    def __init__(self, model: nn.Module, layers: int) -> None:
        """Finds the routers of `model`, a causal language model with this number of decoder layers."""
        self.layers = layers
        self.name = type(model).__name__
        self.experts: Tensor | None = None
        """[tokens, layers, experts per token]; None if routers choose."""
        self.routers: list[Any] = []
        for name, module in model.named_modules():
            if match := ROUTER.search(f"{name}.{type(module).__name__}"):
                self.routers.append(module)
                module.forward = self._replaying(int(match[2]), module.forward)
        if self.routers:
            guard.require("transformers")
        self.covers_all = bool(self.routers) and len(self.routers) == sum(map(takes_experts, model.modules()))

    def use(self, experts: Int[Tensor, "tokens layers_and_choices"] | None, device: torch.device) -> None:
        """Sets the experts for the following passes, including layers that checkpointing runs again.

        Args:
            experts: for each token of a pack, the experts of all layers in turn, on the CPU; None if routers choose.
            device: device of the pack.

        Raises:
            UserError: the experts do not fit this model.
        """
        self.experts = None
        if experts is None:
            return
        choices, most, largest = int(self.routers[0].top_k), int(self.routers[0].num_experts), int(experts.max())
        if experts.shape[1] != self.layers * choices or largest >= most:
            raise UserError(
                f"rollout.router_replay: the rollouts have {experts.shape[1]} experts per token, up to number "
                f"{largest}, but {self.name} has {self.layers} layers with {choices} of {most}: they were "
                "sampled from a different model; delete the round's rollouts and run again"
            )
        self.experts = devices.moved(experts, device).long().view(len(experts), self.layers, choices)

    def require(self, form: str) -> None:
        """Raises UserError if a model that trains in this form of batch, such as packed, cannot replay experts."""
        if form != "packed":
            raise UserError(
                f"rollout.router_replay: {self.name} trains in {form} batches, but replay only supports packed ones; "
                "set it to false"
            )
        if not self.covers_all:
            raise UserError(
                f"rollout.router_replay: {self.name} has no routers that can be replaced (they must choose experts by "
                "one topk, as in Mixtral, Qwen3-MoE, OLMoE and gpt-oss); set it to false"
            )

    def _replaying(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replaying(*args: Any, **named: Any) -> Any:
            if self.experts is None:
                return forward(*args, **named)
            with _Chosen(self.experts[:, layer]):
                return forward(*args, **named)

        return replaying


class _Chosen(TorchFunctionMode):
    """Context manager in which `torch.topk` returns given indices and the values at them."""

    def __init__(self, indices: Int[Tensor, "tokens choices"]) -> None:
        super().__init__()
        self.indices = indices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores: Tensor = args[0]
        return torch.return_types.topk((scores.gather(-1, self.indices), self.indices))
