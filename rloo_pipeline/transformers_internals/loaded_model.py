"""Reads properties of a transformers model: names in its checkpoint, tied weights, expert layers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN = {"top_k_index", "router_indices"}
"""Arguments in which expert layers get the experts of each token."""


def tied_weights(model: Any) -> dict[str, str]:
    """Names of weights that a configuration ties to others (such as `lm_head.weight`), with the names of the others."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def untied_weights(model: Any) -> list[str]:
    """Names of weights that should be tied, but are not, since the checkpoint has different values for them."""
    return sorted(tied_weights(model).keys() - model.all_tied_weights_keys.keys())


def renames_weights(model: Any) -> bool:
    """True if names or shapes in the checkpoint differ from the model's, for example for experts."""
    return bool(getattr(model, "_weight_conversions", None))


def as_in_checkpoint(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model under the names and in the shapes of its checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def decoder_layers(model: Any) -> list[Any]:
    """The layers whose activations a model can recompute."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def takes_experts(layer: Any) -> bool:
    """True if a module is an expert layer that is called with the experts of each token."""
    return hasattr(layer, "num_experts") and bool(CHOSEN & inspect.signature(layer.forward).parameters.keys())


def experts_argument(layer: Any) -> str:
    """Name of the argument in which an expert layer gets the experts of each token."""
    return (CHOSEN & inspect.signature(layer.forward).parameters.keys()).pop()
