"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple


class LearningRate(NamedTuple):
    """Linear warm-up, then constant or a linear or cosine decay to `min_ratio` of the peak.

    The decay ends at step `horizon`; later steps keep its last value.
    """

    peak: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    """Optimizer steps of the warm-up."""
    horizon: int = 0
    """Optimizer step at which the decay ends, after the warm-up."""
    min_ratio: float = 0.0

    def at_step(self, step: int) -> float:
        """Learning rate of an optimizer step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup) / (self.horizon - self.warmup))
        decay = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * decay)
