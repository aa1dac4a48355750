"""From a round's rewards to its advantages, in this order and in one place:

    score Σ_f w_f r_f → left out: masked, of equal rewards → response_length → reward_normalization → reward_clip_range
    → − β·KL of the sequence (kl.placement: reward) → estimator → − β·KL to go (token_reward) → normalize_advantages

Advantages are made over the whole round, before it is cut into optimizer steps.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from rloo_pipeline import references
from rloo_pipeline.algorithm import kl, known, shaping
from rloo_pipeline.algorithm.advantages import Estimator
from rloo_pipeline.config import JSON, Algorithm, Rollout, estimator


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


def make_batch(
    algorithm: Algorithm, rollout: Rollout, completions: Completions, carried: Carried
) -> tuple[Batch, Carried]:
    """Rewards, KL and advantages of a round, and the moments carried on.

    A truncated completion that is masked (mask_truncated_completions) leaves the loss, its denominator and the baseline
    of its siblings. With keep_truncated_in_baseline it leaves the loss alone: with its reward and KL 0 it stays in the
    baseline, and it is counted in the denominator of the mean over completions, as TRL does.
    """
    masked, out = _left_out(algorithm, rollout.num_generations, completions)
    beta = algorithm.beta if carried.beta is None else carried.beta
    scores = shaping.excluded(completions.scores, out)
    rewards, moments = _shaped(algorithm, rollout, scores, completions.mask.sum(-1), carried.moments)
    tokens = _kl_in_reward(algorithm, completions, masked)
    divergence = None if tokens is None else tokens.double().sum(-1)
    penalised = rewards
    if divergence is not None and algorithm.kl.placement == "reward":
        penalised = rewards - beta * divergence
    advantages = _advantages(algorithm, penalised.view(-1, rollout.num_generations), completions.mask, beta, tokens)
    return Batch(completions, rewards, divergence, advantages, masked, out, beta), carried._replace(moments=moments)


def _left_out(algorithm: Algorithm, samples: int, completions: Completions) -> tuple[Tensor, Tensor]:
    """Completions without a loss, and those among them that count nowhere."""
    masked = completions.truncated & algorithm.mask_truncated_completions
    out = masked & (not algorithm.keep_truncated_in_baseline)
    if algorithm.filter_zero_variance:
        grouped = shaping.excluded(completions.scores, out).view(-1, samples)
        dull = known.uninformative(grouped).repeat_interleave(samples)
        masked, out = masked | dull, out | dull
    return masked, out


def _shaped(
    algorithm: Algorithm, rollout: Rollout, rewards: Tensor, lengths: Tensor, moments: shaping.Moments
) -> tuple[Tensor, shaping.Moments]:
    """Rewards with length penalties, standardized and clipped; the moments with this round's rewards in them."""
    length = algorithm.response_length
    if length.overlong_cache is not None:
        penalty = shaping.overlong(lengths, rollout.max_completion_length, length.overlong_cache)
        rewards = rewards + length.overlong_penalty * penalty
    if length.target is not None:
        rewards = rewards + length.target_penalty * shaping.off_target(lengths, length.target)
    if algorithm.reward_normalization != "none":
        moments = (moments if algorithm.reward_normalization == "running" else shaping.Moments()).seen(rewards)
        rewards = moments.standardize(rewards)
    if algorithm.reward_clip_range is not None:
        rewards = rewards.clamp(*algorithm.reward_clip_range)
    return rewards, moments


def _kl_in_reward(algorithm: Algorithm, completions: Completions, masked: Tensor) -> Tensor | None:
    """KL of each token where it is a part of the reward, [completions, longest]."""
    old, reference = completions.old_logps, completions.reference_logps
    if algorithm.kl.placement == "loss" or old is None or reference is None:
        return None
    return kl.estimate(algorithm.kl.estimator, old, reference, completions.mask & ~masked.unsqueeze(-1))


def _advantages(algorithm: Algorithm, rewards: Tensor, mask: Tensor, beta: float, tokens: Tensor | None) -> Tensor:
    """Advantages of rewards [prompts, samples]: [completions], or [completions, longest] with a KL to go."""
    named = references.load(estimator(algorithm.advantage))
    function = named if isinstance(named, Estimator) else Estimator(named, whitened=False)
    found = function.formula(rewards)
    found = torch.where(rewards.isnan(), torch.nan, found).flatten()
    if tokens is not None and algorithm.kl.placement == "token_reward":
        per_token = found.unsqueeze(-1) - beta * kl.to_go(tokens.double())
        found = torch.where(mask, per_token, torch.nan)
    if algorithm.normalize_advantages or function.whitened:
        found = known.whiten(found)
    return found.nan_to_num(0.0).float()
