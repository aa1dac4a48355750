"""Dropout of a model's own, which config.json brings along and which is no part of RLOO.

On in an optimizer step and off in what the step is compared with, it makes a ratio of two different policies.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def remove(model: nn.Module) -> None:
    """Has nothing dropped, neither by dropout layers nor by attention layers or stacks that keep a rate themselves,
    and no noise put before a router of experts.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name.lower() or "jitter" in name.lower()) and type(value) is float:
                setattr(module, name, 0.0)
