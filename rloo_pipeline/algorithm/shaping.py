"""What becomes of rewards before KL and baseline: standardized, and shaped by length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rloo_pipeline.algorithm import nan_stats
from rloo_pipeline.algorithm.shapes import PerCompletion


class Moments(NamedTuple):
    """Number, mean and sum of squared deviations of all rewards seen (Welford 1962)."""

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def seen(self, rewards: PerCompletion) -> Moments:
        """The moments with these rewards added (Chan et al. 1979); NaN is not counted."""
        values = rewards[~rewards.isnan()].double()
        if not values.numel():
            return self
        number = self.number + values.numel()
        lowest = float(values.min())
        gap = lowest - self.mean + float((values - lowest).mean())
        squares = float(nan_stats.centred(values).square().sum())
        return Moments(
            number,
            self.mean + gap * (values.numel() / number),
            self.squares + squares + gap * gap * self.number * values.numel() / number,
        )

    def standardize(self, rewards: PerCompletion) -> PerCompletion:
        """(R − mean) / (std + ε); as they are where fewer than two rewards were ever seen."""
        if self.number < 2:
            return rewards
        std = math.sqrt(self.squares / (self.number - 1))
        return (rewards - self.mean) / (std + nan_stats.STD_EPSILON)


def overlong(lengths: PerCompletion, longest: int, cache: int) -> PerCompletion:
    """Soft over-long penalty: 0 up to longest − cache tokens, then linearly down to −1 at `longest`.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.
    """
    return ((longest - cache - lengths.double()) / cache).clamp(-1.0, 0.0)


def off_target(lengths: PerCompletion, target: int) -> PerCompletion:
    """−|length − target| / target: how far a completion is off the length asked for, in such lengths.

    Aggarwal and Welleck 2025 (L1, arXiv 2503.04697), equation 1, with α = 1/target.
    """
    return -(lengths.double() - target).abs() / target


def excluded(rewards: PerCompletion, out: PerCompletion) -> PerCompletion:
    """Rewards with NaN where `out` is true: such a completion is as if it were not there."""
    return torch.where(out, torch.nan, rewards)
