"""Removes the dropout that a model's config.json configures.

Dropout that is active in the optimizer step but not when π_old is computed makes the ratio compare different policies.
"""

from __future__ import annotations

from torch import nn

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def remove(model: nn.Module) -> None:
    """Sets every dropout rate to 0: of dropout layers, of modules that store a rate, and of expert routers' jitter."""
    for module in model.modules():
        if isinstance(module, DROPOUT):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name.lower() or "jitter" in name.lower()) and type(value) is float:
                setattr(module, name, 0.0)
