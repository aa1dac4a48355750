"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple


class Schedule(NamedTuple):
    """Linear warm-up, then constant, linear or cosine down to `min_ratio` of the peak at `horizon` steps and after."""

    peak: float
    kind: Literal["constant", "linear", "cosine"]
    warmup: int
    horizon: int
    min_ratio: float

    def rate(self, step: int) -> float:
        """Learning rate of the optimizer step with this number (from 0)."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        gone = min(1.0, (step - self.warmup) / max(1, self.horizon - self.warmup))
        left = 1.0 - gone if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * left)
