"""Changes to rewards before KL and baseline: standardization and length penalties."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rloo_pipeline.algorithm import nan_stats


class Moments(NamedTuple):
    """Number, mean and sum of squared deviations of all rewards so far (Welford 1962), and their scores' range."""

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = 0.0
    """Lowest score, without length penalties; 0 before the first."""
    highest: float = 0.0

    def add(self, rewards: Float[Tensor, " completions"], scores: Float[Tensor, " completions"]) -> Moments:
        """The moments with these rewards added (Chan et al. 1979); NaN, the same in rewards and scores, is ignored."""
        values = rewards[~rewards.isnan()].double()
        if not values.numel():
            return self
        number = self.number + values.numel()
        lowest = float(values.min())
        gap = lowest - self.mean + float((values - lowest).mean())
        squares = float(nan_stats.centred(values).square().sum())
        seen = [score for score in scores.tolist() if score == score]
        seen += [self.lowest, self.highest] if self.number else []
        return Moments(
            number,
            self.mean + gap * (values.numel() / number),
            self.squares + squares + gap * gap * self.number * values.numel() / number,
            min(seen),
            max(seen),
        )

    def standardize(self, rewards: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """(R − mean) / (std + ε); unchanged if there have been fewer than two rewards so far.

        If all scores so far are equal, the deviation is that of the penalties alone, and R − mean is not divided by it.
        """
        if self.number < 2:
            return rewards
        if not nan_stats.differ(torch.tensor([self.lowest, self.highest], dtype=torch.float64)):
            return rewards - self.mean
        std = math.sqrt(self.squares / (self.number - 1))
        return (rewards - self.mean) / (std + nan_stats.STD_EPSILON)


def overlong(lengths: Int[Tensor, " completions"], longest: int, cache: int) -> Float[Tensor, " completions"]:
    """Soft over-long penalty: 0 up to longest − cache tokens, then linear down to −1 at `longest`.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13. All lengths are in tokens.
    """
    return ((longest - cache - lengths.double()) / cache).clamp(-1.0, 0.0)


def off_target(lengths: Int[Tensor, " completions"], target: int) -> Float[Tensor, " completions"]:
    """−|length − target| / target: the distance to the target length, relative to it.

    Aggarwal and Welleck 2025 (L1, arXiv 2503.04697), equation 1, with α = 1/target.
    """
    return -(lengths.double() - target).abs() / target


def normalized_sum(
    values: Float[Tensor, "prompts K functions"], weights: Float[Tensor, " functions"]
) -> Float[Tensor, "prompts K"]:
    """GDPO's reward: Σ_f w_f (r_f − mean r_f) / (std r_f + ε), with moments of each function over its group.

    Liu et al. 2026 (arXiv 2601.05242) then standardize the result over the batch; TRL's
    `multi_objective_aggregation: normalize_then_sum`. Functions with different spreads thus count by their weights
    alone, and groups with equal sums of different rewards still teach.

    Args:
        values: scores; NaN where a function does not apply, which then counts 0.
        weights: weights of the functions.

    Returns:
        The sums; NaN for completions that no function with a weight scored.
    """
    by_function = nan_stats.merged(values.movedim(-1, 0))
    normalized = nan_stats.centred(by_function) / (nan_stats.std(by_function) + nan_stats.STD_EPSILON)
    counts = ~by_function.isnan() & (weights != 0).view(-1, 1, 1)
    summed = torch.where(counts, normalized.nan_to_num(0.0) * weights.view(-1, 1, 1), 0.0).sum(0)
    return torch.where(counts.any(0), summed, torch.nan)


def exclude(
    rewards: Float[Tensor, " completions"], excluded: Bool[Tensor, " completions"]
) -> Float[Tensor, " completions"]:
    """Rewards with NaN where `excluded` is true: such a completion is in no baseline."""
    return torch.where(excluded, torch.nan, rewards)
