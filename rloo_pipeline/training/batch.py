"""From a round's rewards to its advantages, in this order and in one place:

    score Σ_f w_f r_f → left out: masked, of equal rewards → response_length → reward_normalization → reward_clip_range
    → − β·KL of the sequence (kl.placement: reward) → estimator → − β·KL to go (token_reward) → normalize_advantages

Advantages are made over the whole round, before it is cut into optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from rloo_pipeline.algorithm import kl, nan_stats, shaping
from rloo_pipeline.algorithm.advantages import Estimator
from rloo_pipeline.config import JSON, Algorithm, Rollout, estimator, import_string
from rloo_pipeline.errors import UserError


class Completions(NamedTuple):
    """A round's completions, one row each; K neighbouring rows are one group."""

    scores: Tensor
    """[completions] float64, weighted sums of the rewards; NaN where unscorable."""
    mask: Tensor
    """[completions, longest] bool, true on the completion's tokens."""
    truncated: Tensor
    """[completions] bool, without an end token."""
    old_logps: Tensor | None
    """[completions, longest] log π_old; None where the first step's own log-probs are the old ones."""
    reference_logps: Tensor | None = None
    """[completions, longest] log π_ref; None where beta is 0."""
    sampling_logps: Tensor | None = None
    """[completions, longest] under the sampler; None where its distribution was cut (top_p, top_k, min_p)."""


class Carried(NamedTuple):
    """What a round hands to the next beside policy and optimizer."""

    beta: float | None = None
    """The steered KL coefficient; None where it is constant."""
    moments: shaping.Moments = shaping.Moments()
    """Of all rewards so far, for reward_normalization: running."""
    num_tokens: int = 0
    """Tokens of prompts and completions so far."""

    @classmethod
    def from_json(cls, found: JSON) -> Self:
        """What `to_json` wrote."""
        return cls(found["beta"], shaping.Moments(**found["moments"]), found["num_tokens"])

    def to_json(self) -> JSON:
        """As plain JSON."""
        return {**self._asdict(), "moments": self.moments._asdict()}


class Batch(NamedTuple):
    """What the optimizer steps of a round need of each completion."""

    completions: Completions
    rewards: Tensor
    """[completions] float64, shaped, standardized and clipped, before KL; NaN where unscorable or left out."""
    kl: Tensor | None
    """[completions] nats, the estimate summed over tokens; None where the KL is not in the reward."""
    advantages: Tensor
    """[completions] float32, or [completions, longest] where each token has its own."""
    masked: Tensor
    """[completions] bool: not in the loss."""
    out: Tensor
    """[completions] bool: as if it were not there, neither in the baseline nor in the loss's denominator."""
    beta: float


class Use(NamedTuple):
    """Which of a round's completions its update uses."""

    masked: Tensor
    """[completions] bool: not in the loss."""
    out: Tensor
    """[completions] bool: as if it were not there."""
    teaching: Tensor
    """[prompts] bool: groups with an advantage that is not 0 on a completion in the loss."""


def use_of(algorithm: Algorithm, samples: int, scores: Tensor, truncated: Tensor) -> Use:
    """What is left out of a round, and which groups teach: the choice among over-sampled groups and the filter of those
    that teach nothing both come from here.

    Args:
        algorithm: says what is masked and filtered.
        samples: K.
        scores: [completions], NaN where unscorable.
        truncated: [completions] bool.
    """
    masked = truncated & algorithm.mask_truncated_completions
    out = masked & (not algorithm.keep_truncated_in_baseline)
    grouped = shaping.excluded(scores, out).view(-1, samples)
    teaching = nan_stats.teaching(grouped, ~masked.view(-1, samples))
    if algorithm.filter_zero_variance:
        dull = ~teaching.repeat_interleave(samples)
        masked, out = masked | dull, out | dull
    return Use(masked, out, teaching)


def make_batch(
    algorithm: Algorithm, rollout: Rollout, completions: Completions, carried: Carried
) -> tuple[Batch, Carried]:
    """Rewards, KL and advantages of a round, and the moments carried on.

    A truncated completion that is masked (mask_truncated_completions) leaves the loss, its denominator and the baseline
    of its siblings. With keep_truncated_in_baseline it leaves the loss alone: with its reward and KL 0 it stays in the
    baseline, and it is counted in the denominator of the mean over completions, as TRL does.

    Raises:
        UserError: the estimator is for scores of 0 and 1, and there are others.
    """
    masked, out, _ = use_of(algorithm, rollout.num_generations, completions.scores, completions.truncated)
    beta = algorithm.beta if carried.beta is None else carried.beta
    scores = shaping.excluded(completions.scores, out)
    rewards, moments = _shaped(algorithm, rollout, scores, completions.mask.sum(-1), carried.moments)
    tokens = _kl_in_reward(algorithm, completions, masked)
    divergence = None if tokens is None else tokens.double().sum(-1)
    penalised = rewards
    if divergence is not None and algorithm.kl.placement == "reward":
        penalised = rewards - beta * divergence
    function = _function(algorithm)
    if function.of_success:
        _check_success(algorithm, scores)
    grouped, plain = (values.view(-1, rollout.num_generations) for values in (penalised, scores))
    found = torch.where(grouped.isnan(), torch.nan, function.formula(grouped)).flatten()
    if tokens is not None and algorithm.kl.placement == "token_reward":
        per_token = found.unsqueeze(-1) - beta * kl.to_go(tokens.double())
        found = torch.where(completions.mask, per_token, torch.nan)
    if algorithm.normalize_advantages or function.whitened:
        # where the scores alone make no two advantages differ, penalties would be all that there is to divide by
        found = nan_stats.whiten(found, divide=nan_stats.differ(function.formula(plain)))
    advantages = found.nan_to_num(0.0).float()
    return Batch(completions, rewards, divergence, advantages, masked, out, beta), carried._replace(moments=moments)


def _shaped(
    algorithm: Algorithm, rollout: Rollout, rewards: Tensor, lengths: Tensor, moments: shaping.Moments
) -> tuple[Tensor, shaping.Moments]:
    """Rewards with length penalties, standardized and clipped; the moments with this round's rewards in them. Where all
    scores ever seen are equal, there is nothing but penalties to standardize by, and rewards stay as they are.
    """
    length, differ = algorithm.response_length, nan_stats.differ(rewards)
    if length.overlong_cache is not None:
        penalty = shaping.overlong(lengths, rollout.max_completion_length, length.overlong_cache)
        rewards = rewards + length.overlong_penalty * penalty
    if length.target is not None:
        rewards = rewards + length.target_penalty * shaping.off_target(lengths, length.target)
    if algorithm.reward_normalization != "none":
        before = moments if algorithm.reward_normalization == "running" else shaping.Moments()
        moments = before.seen(rewards)
        rewards = moments.standardize(rewards) if differ or before.number else rewards
    if algorithm.reward_clip_range is not None:
        rewards = rewards.clamp(*algorithm.reward_clip_range)
    return rewards, moments


def _kl_in_reward(algorithm: Algorithm, completions: Completions, masked: Tensor) -> Tensor | None:
    """KL of each token where it is a part of the reward, [completions, longest]."""
    old, reference = completions.old_logps, completions.reference_logps
    if algorithm.kl.placement == "loss" or old is None or reference is None:
        return None
    return kl.estimate(algorithm.kl.estimator, old, reference, completions.mask & ~masked.unsqueeze(-1))


def _function(algorithm: Algorithm) -> Estimator:
    """The advantage estimator."""
    named = import_string.load(estimator(algorithm.advantage))
    return named if isinstance(named, Estimator) else Estimator(named)


def _check_success(algorithm: Algorithm, scores: Tensor) -> None:
    """Makes sure that every known score is 0 or 1."""
    others = scores[~scores.isnan() & (scores != 0) & (scores != 1)]
    if others.numel():
        raise UserError(
            f"algorithm.advantage: {algorithm.advantage} has a meaning for scores of 0 and 1 alone, and "
            f"{others.numel()} of the {scores.numel()} completions of this round have others, such as "
            f"{float(others[0]):g}; take rewards whose weighted sum is 0 or 1, or another estimator"
        )
