"""Turns a round's rewards into advantages, in this order:

    score Σ_f w_f r_f → exclude masked completions and groups of equal rewards → each r_f normalized before the sum
    (multi_objective_aggregation) → response_length → reward_normalization → reward_clip_range
    → − β·KL of the sequence (kl.placement: reward) → estimator → − β·KL to go (token_reward) → normalize_advantages
    → − weight·KL to the teacher, to go

Advantages are computed over the whole round, before it is split into optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rloo_pipeline import import_string
from rloo_pipeline.algorithm import kl, nan_stats, shaping, token_choice
from rloo_pipeline.algorithm.advantages import Estimator, Formula, enlarges_penalties, has_batch_baseline
from rloo_pipeline.config import JSON, Algorithm, Rollout, estimator
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.training.selection import ScoresByFunction, select

SIGNAL = 1e-6
"""An advantage below this counts as 0, since means of equal rewards are rounded."""


class RoundTensors(NamedTuple):
    """The tensors that advantages and loss need, one row per completion of a round; K consecutive rows are one group.

    Their token ids are in `packing.Sequences`, row by row.
    """

    scores: Float64[Tensor, " completions"]
    """Weighted sums of the rewards; NaN where unscorable."""
    mask: Bool[Tensor, "completions tokens"]
    """True for tokens that the model sampled, which come first in their row; tokens of tools and users are left out."""
    truncated: Bool[Tensor, " completions"]
    """True if the completion has no end token. An episode that ends after its last allowed turn is not truncated; one
    that runs out of room for a token or for a tool's answer is."""
    old_logps: Float[Tensor, "completions tokens"] | None
    """log π_old; None if the log-probs of the first step serve as π_old's."""
    reference_logps: Float[Tensor, "completions tokens"] | None = None
    """log π_ref; None if beta is 0."""
    teacher_logps: Float[Tensor, "completions tokens"] | None = None
    """log π_teacher; None without a teacher."""
    sampling_logps: Float[Tensor, "completions tokens"] | None = None
    """Log-probs under the sampler; None if its distribution was truncated (top_p, top_k, min_p)."""
    lengths: Int[Tensor, " completions"] | None = None
    """Tokens that count against `max_completion_length`, including those of tools and users; None if there are none."""
    teacher_top_logps: Float[Tensor, "completions tokens K"] | None = None
    """The teacher's log-probs of its likeliest tokens; −inf for tokens that are not in the student's vocabulary.
    None without `algorithm.teacher.top_k`."""
    entropies: Float[Tensor, "completions tokens"] | None = None
    """Entropies of π_old in nats; None without `algorithm.top_entropy_quantile`."""
    functions: ScoresByFunction | None = None
    """Needed for `multi_objective_aggregation: normalize_then_sum`."""


class AlgorithmState(NamedTuple):
    """State of the algorithm, besides policy and optimizer, that carries over from round to round."""

    beta: float | None = None
    """The adapted KL coefficient; None if it is constant."""
    moments: shaping.Moments = shaping.Moments()
    """Moments of all rewards so far, for `reward_normalization: running`."""
    num_tokens: int = 0
    """Prompt and completion tokens so far."""

    @classmethod
    def from_json(cls, fields: JSON) -> AlgorithmState:
        """Reads what `to_json` wrote."""
        return cls(fields["beta"], shaping.Moments(**fields["moments"]), fields["num_tokens"])

    def to_json(self) -> JSON:
        """The state as JSON values."""
        return {**self._asdict(), "moments": self.moments._asdict()}


class Batch(NamedTuple):
    """Everything that the optimizer steps of a round need, one row per completion."""

    completions: RoundTensors
    rewards: Float64[Tensor, " completions"]
    """Rewards with length penalties, standardized and clipped, before KL; NaN where unscorable or excluded."""
    kl: Float64[Tensor, " completions"] | None
    """KL estimate summed over tokens, in nats; None if the KL is not in the reward."""
    advantages: Float[Tensor, " completions"] | Float[Tensor, "completions tokens"]
    """Per token under `kl.placement: token_reward` or with a teacher without `top_k`."""
    masked: Bool[Tensor, " completions"]
    """True for completions that are left out of the loss."""
    excluded: Bool[Tensor, " completions"]
    """True for completions that are neither in the baseline nor in the denominator of the loss."""
    beta: float
    teacher_kl: Float64[Tensor, " completions"] | None = None
    """log π_old − log π_teacher summed over tokens, in nats; None if it is not in the advantages."""
    kept: Bool[Tensor, "completions tokens"] | None = None
    """Tokens that `top_entropy_quantile` keeps in the policy loss; None if it keeps all."""
    chosen: Bool[Tensor, "completions tokens"] | None = None
    """Tokens that `clip: clip_cov` drops or `clip: kl_cov` holds back; None if there are none."""


def make_batch(
    algorithm: Algorithm, rollout: Rollout, completions: RoundTensors, state: AlgorithmState
) -> tuple[Batch, AlgorithmState]:
    """Computes rewards, KL and advantages of a round.

    A truncated completion that is masked (`mask_truncated_completions`) is removed from the loss, from the denominator
    of the loss and from the baseline of its siblings. With `keep_truncated_in_baseline` it is removed from the loss
    only: it stays in the baseline with its reward and a KL of 0, and counts in the denominator of the mean over
    completions, as in TRL.

    Returns:
        The batch, and the state with this round's rewards in its moments.

    Raises:
        UserError: the estimator needs scores of 0 and 1, but there are others; or see `check_keys_of_estimator`.
    """
    masked, excluded, _ = select(algorithm, rollout.num_generations, completions.scores, completions.truncated)
    beta = algorithm.beta if state.beta is None else state.beta
    if algorithm.multi_objective_aggregation == "sum_then_normalize":
        scores = shaping.exclude(completions.scores, excluded)
    else:
        assert completions.functions is not None
        scores = completions.functions.normalized_sums(excluded, rollout.num_generations)
    scores = nan_stats.merged(scores.view(-1, rollout.num_generations)).flatten()
    rewards, unpenalised, moments = _shaped(algorithm, rollout, scores, completions, state.moments)
    token_kl = _kl_in_reward(algorithm, completions, masked)
    divergence = None if token_kl is None else token_kl.double().sum(-1)
    penalised = rewards
    if divergence is not None and algorithm.kl.placement == "reward":
        penalised = rewards - beta * divergence
    function = load_estimator(algorithm)
    if function.of_success:
        _check_success(algorithm, scores)
    check_keys_of_estimator(algorithm, rollout, function)
    grouped, *plain = (values.view(-1, rollout.num_generations) for values in (penalised, scores, unpenalised))
    advantages = torch.where(grouped.isnan(), torch.nan, function.formula(grouped)).flatten()
    if token_kl is not None and algorithm.kl.placement == "token_reward":
        per_token = advantages.unsqueeze(-1) - beta * kl.reward_to_go(token_kl.double())
        advantages = torch.where(completions.mask, per_token, torch.nan)
    if algorithm.normalize_advantages or function.whitened:
        # If the scores alone, raw or clipped, give equal advantages, any spread comes from the penalties or from
        # rounding: do not divide by it.
        divide = nan_stats.differ(scores) and all(nan_stats.differ(function.formula(values)) for values in plain)
        advantages = nan_stats.whiten(advantages, divide)
    advantages, teacher_kl = advantages.nan_to_num(0.0), None
    if algorithm.teacher is not None and algorithm.values_by_teacher:
        token_kl = _kl_to_teacher(completions, masked)
        teacher_kl = token_kl.sum(-1)
        of_rewards = advantages if advantages.dim() == 2 else advantages.unsqueeze(-1)
        distilled = algorithm.teacher.weight * kl.reward_to_go(token_kl, algorithm.teacher.discount)
        advantages = torch.where(completions.mask, of_rewards - distilled, 0.0)
    batch = Batch(completions, rewards, divergence, advantages.float(), masked, excluded, beta, teacher_kl)
    return batch, state._replace(moments=moments)


def with_choices(algorithm: Algorithm, batch: Batch, seed: int) -> Batch:
    """Marks the tokens that the losses of a batch leave out or hold back; `seed` seeds the choice of `clip_cov`.

    Without log-probs of π_old before the first step, no token is held back: all ratios are 1 then.
    """
    completions, kept, chosen = batch.completions, None, None
    mask = completions.mask & ~batch.masked.unsqueeze(-1)
    if completions.entropies is not None:
        kept = token_choice.top_entropy(completions.entropies, mask, algorithm.top_entropy_quantile)
    if (old := completions.old_logps) is not None and algorithm.clip == "clip_cov":
        bounds = algorithm.clip_cov_lb, algorithm.clip_cov_ub
        chosen = token_choice.clip_cov(batch.advantages, old, mask, algorithm.clip_cov_ratio, *bounds, seed)
    elif old is not None and algorithm.clip == "kl_cov":
        chosen = token_choice.kl_cov(batch.advantages, old, mask, algorithm.kl_cov_ratio)
    return batch._replace(kept=kept, chosen=chosen)


def _shaped(
    algorithm: Algorithm, rollout: Rollout, scores: Tensor, completions: RoundTensors, moments: shaping.Moments
) -> tuple[Tensor, Tensor, shaping.Moments]:
    """Applies length penalties, standardization and clipping.

    Returns:
        The rewards, the rewards without penalties, and the updated moments.
    """
    length, rewards = algorithm.response_length, scores
    sampled = completions.mask.sum(-1)
    if length.overlong_cache is not None:
        lengths = sampled if completions.lengths is None else completions.lengths
        penalty = shaping.overlong(lengths, rollout.max_completion_length, length.overlong_cache)
        rewards = rewards + length.overlong_penalty * penalty
    if length.target is not None:
        rewards = rewards + length.target_penalty * shaping.off_target(sampled, length.target)
    both = torch.stack([rewards, scores])
    if algorithm.reward_normalization != "none":
        previous = moments if algorithm.reward_normalization == "running" else shaping.Moments()
        moments = previous.add(rewards, scores)
        both = moments.standardize(both)
    if algorithm.reward_clip_range is not None:
        both = both.clamp(*algorithm.reward_clip_range)
    return both[0], both[1], moments


def _kl_in_reward(algorithm: Algorithm, completions: RoundTensors, masked: Tensor) -> Tensor | None:
    """[completions, longest] KL of each token; None if the KL is not in the reward."""
    old, reference = completions.old_logps, completions.reference_logps
    if algorithm.kl.placement == "loss" or old is None or reference is None:
        return None
    return kl.estimate(algorithm.kl.estimator, old, reference, completions.mask & ~masked.unsqueeze(-1))


def _kl_to_teacher(completions: RoundTensors, masked: Tensor) -> Float64[Tensor, "completions tokens"]:
    """log π_old − log π_teacher of each token; its mean over samples of π_old is the reverse KL."""
    old, teacher = completions.old_logps, completions.teacher_logps
    assert old is not None, "`needs_old_pass` is true"
    assert teacher is not None, "`RoundFiles.used` requires its tables"
    return kl.estimate("k1", old, teacher, completions.mask & ~masked.unsqueeze(-1)).double()


def load_estimator(algorithm: Algorithm) -> Estimator:
    """Returns the estimator. A user's own raises UserError if it does not return a finite advantage for each completion
    that has something to compare with.
    """
    function = import_string.load(estimator(algorithm.advantage))
    if ":" not in algorithm.advantage:
        assert isinstance(function, Estimator)
        return function
    own = function if isinstance(function, Estimator) else Estimator(function)

    call = f"algorithm.advantage: {algorithm.advantage}"

    def called(rewards: Tensor) -> Tensor:
        own_rewards = rewards.clone()  # the function may change them
        returned = call_own("advantage", algorithm.advantage, own.formula, own_rewards)
        return of_shape(returned, rewards, call, "rewards", "[prompts, K]").double()

    def checked(rewards: Tensor) -> Tensor:
        advantages = called(rewards)
        if bool((advantages.abs() >= torch.finfo(torch.float32).max).any()):
            raise UserError(
                f"{call} returns infinite advantages for finite rewards; add a small number to what it divides by"
            )
        lost = advantages.isnan() & ~rewards.isnan()
        differs = (nan_stats.centred(rewards).abs() > nan_stats.rounding(rewards)).any(-1, keepdim=True)
        if bool(lost.any()) and bool((lost & (differs | _has_signal(called, rewards))).any()):
            raise UserError(
                f"{call} returns NaN for a completion with a reward, which would count as 0; completions without a "
                "reward have NaN, so take nanmean or nanmedian, or return 0 for what is not to count"
            )
        return advantages

    return Estimator(checked, own.whitened, own.of_success)


def _has_signal(formula: Formula, rewards: Float64[Tensor, "prompts K"]) -> Bool[Tensor, "prompts K"]:
    """True where the advantage would not be 0 if completions without a reward had the lowest of their group."""
    lowest = rewards.nan_to_num(torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0.0)
    return formula(torch.where(rewards.isnan(), lowest, rewards)).abs() > SIGNAL


def check_keys_of_estimator(algorithm: Algorithm, rollout: Rollout, function: Estimator) -> None:
    """Checks that the estimator can be used with other keys. For those of this package, the configuration does so.

    Raises:
        UserError: groups of equal scores have advantages, but the configuration drops them; or the estimator makes
            large advantages of small penalties in a group of equal scores.
    """
    filters, length = algorithm.filter_zero_variance, algorithm.response_length
    uses_equal_groups = has_batch_baseline(function.formula, rollout.num_generations)
    if (filters or rollout.oversample > 1) and uses_equal_groups:
        raise UserError(
            f"algorithm.advantage: {algorithm.advantage} gives groups of equal scores a signal too, so none may be "
            "left out; set algorithm.filter_zero_variance: false and rollout.oversample: 1"
        )
    cures = []
    if algorithm.beta and algorithm.kl.placement == "reward":
        cures.append("set algorithm.kl.placement: loss with kl.estimator: k3")
    if length.overlong_cache is not None or length.target is not None:
        cures.append("leave algorithm.response_length out")
    if cures and not filters and enlarges_penalties(function.formula, rollout.num_generations):
        cure = " and ".join(cures)
        if not uses_equal_groups:
            cure = f"set algorithm.filter_zero_variance: true, or {cure}"
        raise UserError(
            f"algorithm.advantage: {algorithm.advantage} makes a penalty of 0.01 in a group of equal scores count more "
            f"than a tenth of a wrong answer, as if it divided by their spread; {cure}"
        )


def call_own(key: str, reference: str, function: Callable[..., object], *arguments: Tensor, **named: Tensor) -> object:
    """Calls a user's function that a key of `algorithm` names.

    Raises:
        UserError: the function raised an exception; the message has the line in the user's file.
    """
    try:
        return function(*arguments, **named)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = one_line(f"{type(error).__name__}: {error}", 200)
        where = import_string.error_location(error, reference)
        raise UserError(f"algorithm.{key}: {reference} raised {message}{where}; correct it") from error


def of_shape(returned: object, argument: Tensor, call: str, kind: str, dimensions: str) -> Tensor:
    """The value that a user's function returned for an argument of this kind.

    Raises:
        UserError: it is not a tensor of the argument's shape.
    """
    if isinstance(returned, Tensor) and returned.shape == argument.shape:
        return returned
    shape = tuple(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
    raise UserError(
        f"{call} returned {shape} for {kind} {tuple(argument.shape)}; return a tensor of their shape {dimensions}"
    )


def _check_success(algorithm: Algorithm, scores: Tensor) -> None:
    """Raises if a score is neither 0, 1 nor NaN."""
    others = scores[~scores.isnan() & (scores != 0) & (scores != 1)]
    if others.numel():
        raise UserError(
            f"algorithm.advantage: {algorithm.advantage} needs scores of 0 and 1, but {others.numel()} of the "
            f"{scores.numel()} completions of this round have other scores, such as {float(others[0]):g}; "
            "use rewards whose weighted sum is 0 or 1, or a different estimator"
        )
