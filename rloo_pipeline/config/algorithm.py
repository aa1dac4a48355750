"""The section `algorithm`: which RLOO. Combinations that mean nothing are refused."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.config import presets
from rloo_pipeline.config.section import Section
from rloo_pipeline.errors import did_you_mean


class KL(Section):
    """The penalty for leaving the reference policy (policy 0); its coefficient is algorithm.beta."""

    placement: Literal["reward", "token_reward", "loss"] = "reward"
    """Where the penalty goes: into each completion's reward before the baseline (the RLOO paper), into each token's
    reward-to-go after the baseline, or into the loss with a gradient of its own (GRPO).
    """
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimates from sampled tokens. In a reward only k1 is unbiased; in the loss k1 has no gradient on
    average.
    """
    bias_correction: bool = False
    """Multiply the penalty in the loss by the ratio (DeepSeek-V3.2; TRL's use_bias_correction_kl)."""
    target: float | None = Field(None, gt=0)
    """KL of a completion in nats that beta is steered to after each round (Ziegler et al. 2019); constant beta where
    not given.
    """
    gain: float = Field(0.1, gt=0)
    """How fast beta is steered: at most a fifth of this share a round."""


class Mismatch(Section):
    """What is done where the sampler (vLLM) and the trainer give a token different log-probs."""

    correction: Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "sequence_mean_mis"] = "none"
    """Importance weights of the trainer over the sampler: truncated (tis) or dropped outside the thresholds (mis), for
    each token or for the whole completion. token_mis with both thresholds is IcePop's two-sided mask.
    sequence_mean_mis drops a completion where the geometric mean of its tokens' weights is outside the thresholds, and
    weighs the others by 1; unlike a product over tokens, that does not drift with length.
    """
    max: float | None = Field(2.0, gt=0)
    """Upper threshold of a weight; without one a weight is bounded by e^20."""
    min: float | None = Field(None, ge=0)
    """Lower threshold of a weight. sequence_mean_mis needs both, near 1, such as 0.98 and 1.02."""


class ResponseLength(Section):
    """Shaping of the reward by the completion's length in tokens; both penalties may be on."""

    overlong_cache: int | None = Field(None, ge=1)
    """Soft over-long penalty (DAPO): over the last so many tokens before max_completion_length it grows to
    overlong_penalty.
    """
    overlong_penalty: float = Field(1.0, ge=0)
    """What a completion of full length loses."""
    target: int | None = Field(None, ge=1)
    """Length that completions are drawn to."""
    target_penalty: float = Field(1.0, ge=0)
    """What a completion loses for each target's length that it is off its target."""


class Algorithm(Section):
    """Which RLOO: every choice that changes the gradient, under TRL's names where TRL has one (docs/algorithms.md)."""

    preset: str | None = None
    """Values for the keys of this section that are not given: a system's RLOO (paper, trl, openrlhf, verl, nemo_rl,
    skyrl, tunix) or an algorithm (rloo, grpo, dr_grpo, reinforce_pp, …). See docs/algorithms.md.
    """
    advantage: str = "rloo"
    """Advantage estimator: a function in algorithm/advantages.py, or one of your own as `module:function`."""
    normalize_advantages: bool = False
    """Subtract the mean of all advantages of a round and divide by their standard deviation."""
    reward_normalization: Literal["none", "batch", "running"] = "none"
    """Standardize rewards, shaped by length: over the round, or by moments carried on from round to round."""
    reward_clip_range: tuple[float, float] | None = None
    """Clip each completion's weighted reward to this range before KL and baseline."""
    response_length: ResponseLength = ResponseLength()
    """Length as a part of the reward."""
    beta: float = Field(0.05, ge=0)
    """KL coefficient; at 0 the reference model is neither staged nor run."""
    kl: KL = KL()
    """Where and how the KL counts."""
    importance_sampling_level: Literal["sequence", "sequence_mean", "token"] = "sequence"
    """What one action is: the whole completion (RLOO), its length-normalised ratio (GSPO), or a token."""
    old_logps: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probs stand for the policy that sampled: the trainer's own, computed again, or the sampler's."""
    clip: Literal["ppo", "cispo", "none"] = "ppo"
    """PPO's pessimistic clip of the ratio; CISPO's clipped weight without gradient on log-probs; or none: REINFORCE
    without a ratio.
    """
    epsilon: float = Field(0.2, gt=0)
    """Clip range of the ratio below 1, and above it where epsilon_high is not given."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clip range of the ratio above 1 (clip-higher); with CISPO the weight's bound is 1 + epsilon_high."""
    delta: float | None = Field(None, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative; must exceed 1 + epsilon_high."""
    loss_agg_mode: Literal[
        "sequence",
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ] = "sequence"
    """How a step's loss is made of its parts: mean over completions of each one's actions (RLOO), mean over all tokens
    (DAPO), mean over completions of their tokens' mean (GRPO), of their sum, or of that over max_completion_length (Dr.
    GRPO).
    """
    mask_truncated_completions: bool = False
    """Leave completions without an end token out of the loss. An optimizer step in which nothing is left is not made.
    """
    keep_truncated_in_baseline: bool = False
    """A masked completion still counts, with KL 0, in its siblings' baseline and in the loss's denominator (TRL); else
    it is as if it were not there.
    """
    filter_zero_variance: bool = False
    """Leave out groups that teach nothing, whose scores are equal, as if they were not there; see rollout.oversample.
    An optimizer step in which nothing is left is not made.
    """
    mismatch: Mismatch = Mismatch()
    """Sampler against trainer."""
    num_iterations: int = Field(1, ge=1)
    """Passes over a round's completions (mu in the GRPO paper)."""
    steps_per_generation: int = Field(1, ge=1)
    """Optimizer steps in one pass; generation_batch_size is cut into so many mini-batches of whole groups."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        return presets.fill(given) if isinstance(given, dict) else given

    @field_validator("advantage")
    @classmethod
    def _known_estimator(cls, name: str) -> str:
        if ":" not in name and name not in (known := estimators()):
            raise ValueError(f"no estimator '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}")
        return name

    @model_validator(mode="after")
    def _divides_by_scores_alone(self) -> Self:
        """A spread that a penalty is a part of is the penalty's alone where scores are equal: divided by it, a penalty
        of 0.001 becomes an advantage of 1. GRPO (arXiv 2402.03300, section 4.1.1) and TRL keep the KL out for that.
        """
        name, length = self.advantage, self.response_length
        if name not in estimators("divided", "of_success"):
            return self
        what = "divides by the spread of a group's rewards" if name in estimators("divided") else "is of scores 0 and 1"
        if self.beta != 0 and self.kl.placement == "reward":
            raise ValueError(
                f"advantage: {name} {what}, so kl.placement: reward would make advantages of the KL's own differences; "
                "set kl.placement: loss, with kl.estimator: k3 or k2"
            )
        if (length.overlong_cache is not None or length.target is not None) and not (
            name == "grpo" and self.filter_zero_variance
        ):
            cure = "set filter_zero_variance: true, as DAPO does, or " if name == "grpo" else ""
            raise ValueError(
                f"advantage: {name} {what}, so response_length would make advantages of differences in length alone; "
                f"{cure}take another estimator"
            )
        if name in estimators("of_success"):
            changed = {
                "reward_normalization": self.reward_normalization != "none",
                "reward_clip_range": self.reward_clip_range is not None,
            }
            for key in (key for key, on in changed.items() if on):
                raise ValueError(f"advantage: {name} {what}, which {key} changes; leave it out")
        return self

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(f"delta ({self.delta:g}) must exceed 1 + epsilon_high ({1 + high:g}), else it clips first")
        if self.delta is not None and self.clip != "ppo":
            raise ValueError(f"delta is a part of clip: ppo, not of clip: {self.clip}")
        if self.kl.placement == "token_reward" and self.importance_sampling_level != "token" and self.clip != "none":
            raise ValueError(
                "kl.placement: token_reward gives each token an advantage of its own, so a token must be an action; "
                "set importance_sampling_level: token (or clip: none)"
            )
        if self.kl.target is not None and self.beta == 0:
            raise ValueError("kl.target steers beta by factors, which cannot leave 0; set beta to its first value")
        if self.kl.bias_correction and (self.kl.placement != "loss" or self.clip == "none"):
            raise ValueError(
                "kl.bias_correction multiplies the KL in the loss by the ratio; it needs kl.placement: loss "
                "and a clip other than none"
            )
        return self._coherent_mismatch()

    def _coherent_mismatch(self) -> Self:
        correction, low, high = self.mismatch.correction, self.mismatch.min, self.mismatch.max
        if correction != "none" and self.old_logps == "sampler":
            raise ValueError(
                f"mismatch.correction: {correction} weighs the trainer's log-probs against the sampler's, and "
                "old_logps: sampler has the ratio do that already; use old_logps: trainer"
            )
        if correction.startswith("token") and self.loss_agg_mode == "sequence" and not self.acts_on_tokens:
            raise ValueError(
                f"mismatch.correction: {correction} weighs tokens, and here a completion is one action; use "
                f"sequence_mean_mis or {correction.replace('token', 'sequence')}"
            )
        if low is not None and high is not None and low > high:
            raise ValueError(f"mismatch.min ({low:g}) exceeds mismatch.max ({high:g})")
        if correction == "sequence_mean_mis" and (low is None or high is None or not low < 1 < high):
            raise ValueError(
                "mismatch.correction: sequence_mean_mis drops completions on either side; give mismatch.min and "
                "mismatch.max below and above 1, such as 0.98 and 1.02"
            )
        if correction.endswith("mis") and low is None and high is None:
            raise ValueError(
                f"mismatch.correction: {correction} drops by thresholds; give mismatch.min or mismatch.max"
            )
        return self

    @property
    def acts_on_tokens(self) -> bool:
        """Whether the loss has a term for each token rather than one for the whole completion."""
        return self.importance_sampling_level == "token" or self.clip != "ppo"


def estimator(name: str) -> str:
    """The reference of an advantage estimator: as given, or that of a built-in one."""
    return name if ":" in name else f"rloo_pipeline.algorithm.advantages:{name}"


MARKS = ("estimator", "whitened", "divided", "of_success")
"""Decorators in algorithm/advantages.py."""


@cache
def estimators(*marks: str) -> tuple[str, ...]:
    """Names of the built-in advantage estimators under any of these marks (all where none is given), read off their
    file, since importing it takes torch.
    """
    file = Path(__file__).parents[1] / "algorithm" / "advantages.py"
    functions = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef))
    wanted = set(marks or MARKS)
    return tuple(f.name for f in functions if wanted & {getattr(mark, "id", None) for mark in f.decorator_list})
