"""The section `algorithm`: every choice that changes the gradient. Contradictory combinations are errors."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rloo_pipeline.config import presets
from rloo_pipeline.config.corrections import KL, Mismatch, ResponseLength
from rloo_pipeline.config.data import ModelSource
from rloo_pipeline.config.distillation import Teacher
from rloo_pipeline.config.section import Reference, Section
from rloo_pipeline.errors import did_you_mean

RatioLevel = Literal["sequence", "sequence_mean", "token"]
Clip = Literal["ppo", "cispo", "sapo", "dppo_tv", "vespo", "clip_cov", "kl_cov", "none"]
LossAggMode = Literal[
    "sequence", "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
MARKS = ("estimator", "whitened", "divided", "of_success")
"""Decorators of the estimators in algorithm/advantages.py."""


def estimator(name: str) -> str:
    """Import string of an advantage estimator; a built-in one may be named without its module."""
    return name if ":" in name else f"rloo_pipeline.algorithm.advantages:{name}"


@cache
def estimators(*marks: str) -> tuple[str, ...]:
    """Names of the built-in advantage estimators that have any of these decorators; without arguments, all of them.

    Reads the source file, because importing it would import torch.
    """
    file = Path(__file__).parents[1] / "algorithm" / "advantages.py"
    functions = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef))
    decorators = set(marks or MARKS)
    return tuple(f.name for f in functions if decorators & {getattr(mark, "id", None) for mark in f.decorator_list})


def check_estimator(name: str) -> str:
    """Returns the name of a built-in estimator, or an import string; otherwise raises ValueError."""
    if ":" not in name and name not in (names := estimators()):
        raise ValueError(f"no estimator '{name}'{did_you_mean(name, names)}; there are {', '.join(names)}")
    return name


def check_range(limits: tuple[float, float] | None) -> tuple[float, float] | None:
    """Returns the range if its first number is the lower one; otherwise raises ValueError."""
    if limits is not None and limits[0] >= limits[1]:
        raise ValueError(f"[{limits[0]:g}, {limits[1]:g}] is not a range; the first number must be the lower one")
    return limits


class Algorithm(Section):
    """The policy-gradient algorithm: every choice that changes the gradient, under TRL's names where TRL has one. See
    docs/algorithms.md.
    """

    preset: str | None = None
    """Fills the keys of this section that you leave out: with RLOO as another system implements it (`paper`, `trl`,
    `openrlhf`, `verl`, `nemo_rl`, `skyrl`, `tunix`), or with an algorithm (`rloo`, `grpo`, `dr_grpo`, `reinforce_pp`,
    …). docs/algorithms.md lists all presets.
    """
    advantage: Annotated[str, AfterValidator(check_estimator)] = "rloo"
    """Advantage estimator: the name of a function in `rloo_pipeline/algorithm/advantages.py`, or your own as
    `module:function` or `file.py:function`. See docs/ideas.md.
    """
    normalize_advantages: bool = False
    """Standardize the advantages of a round: subtract their mean and divide by their standard deviation."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards are combined. `normalize_then_sum` (GDPO) standardizes each reward within its group before
    the weighted sum, so that no reward dominates merely because its values vary more. `preset: gdpo` also standardizes
    the sums.
    """
    reward_normalization: Literal["none", "batch", "running"] = "none"
    """Standardize rewards after the length penalties: `batch` with the mean and standard deviation of the round,
    `running` with those of all rounds so far. While all these scores are equal, only the mean is subtracted.
    """
    reward_clip_range: Annotated[tuple[float, float] | None, AfterValidator(check_range)] = None
    """Range `[low, high]` to which the weighted sum of a completion's rewards is clipped, before KL and baseline."""
    response_length: ResponseLength = ResponseLength()
    """Length penalties in the reward."""
    beta: float = Field(0.05, ge=0)
    """KL coefficient. With 0 there is no `reference` stage and no reference model is loaded."""
    kl: KL = KL()
    """Placement and estimator of the KL penalty."""
    teacher: Teacher | None = None
    """Model or models to distill from. Off by default."""
    importance_sampling_level: RatioLevel = "sequence"
    """Level of the policy ratio. `sequence`: the whole completion is one action (RLOO). `sequence_mean`: the
    length-normalized ratio of the completion (GSPO). `token`: each token is an action.
    """
    old_logps: Literal["trainer", "sampler"] = "trainer"
    """Source of the old log-probs in the ratio. `trainer`: recomputed by the trainer before the update. `sampler`: as
    vLLM returned them, which saves that forward pass; with `rollout.lag` the ratio is then relative to the older
    policy.
    """
    clip: Clip = "ppo"
    """How the policy ratio is limited. `ppo`: PPO's pessimistic clip. `cispo`: the clipped ratio is a constant weight
    (no gradient) on the log-prob. `sapo`: a soft gate on the ratio instead of a clip range. `dppo_tv`: no gradient for
    a token whose probability moved by more than epsilon. `vespo`: a smooth weight that depends on the ratio of the
    whole completion. `clip_cov`: PPO's clip, with some tokens of high covariance dropped. `kl_cov`: no clip, but the
    tokens of highest covariance are held near the old policy. `none`: REINFORCE without a ratio. All but `ppo`, `cispo`
    and `none` need `importance_sampling_level: token`.
    """
    loss: Reference | None = None
    """Your own loss instead of `clip`, as `module:function` or `file.py:function`. It is called as `f(logps, old_logps,
    advantages, mask)` with tensors [completions, tokens] and returns the loss of each token. Each token is an action.
    See docs/ideas.md.
    """
    epsilon: float = Field(0.2, gt=0)
    """Clip range of the ratio: the lower bound is 1 − epsilon, and the upper bound 1 + epsilon unless `epsilon_high` is
    set. With `clip: dppo_tv`, the largest change in a token's probability.
    """
    epsilon_high: float | None = Field(None, gt=0)
    """Separate upper clip range (DAPO's clip-higher): the upper bound is 1 + epsilon_high. With `clip: cispo` it bounds
    the weight.
    """
    delta: float | None = Field(None, gt=1)
    """Dual clip: upper bound of the ratio where the advantage is negative. Must exceed 1 + epsilon_high. Off by
    default.
    """
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """Gate temperature of `clip: sapo` where the advantage is positive. At a higher temperature the gate closes
    sooner.
    """
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """Gate temperature of `clip: sapo` where the advantage is not positive."""
    vespo_k_pos: float = Field(2.0, gt=0)
    """k of `clip: vespo`, w^k e^(λ(1 − w)), if the advantage is not negative. A larger k reduces the weight of small
    ratios.
    """
    vespo_lambda_pos: float = Field(3.0, gt=0)
    """λ of `clip: vespo` if the advantage is not negative. A larger λ reduces the weight of large ratios."""
    vespo_k_neg: float = Field(3.0, gt=0)
    """k of `clip: vespo` if the advantage is negative."""
    vespo_lambda_neg: float = Field(2.0, gt=0)
    """λ of `clip: vespo` if the advantage is negative."""
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of a round's tokens that `clip: clip_cov` drops (verl's key, like the next three)."""
    clip_cov_lb: float = 1.0
    """Only tokens whose covariance of advantage and log-prob exceeds this are dropped."""
    clip_cov_ub: float = 5.0
    """Only tokens whose covariance is below this are dropped."""
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of a round's tokens that `clip: kl_cov` holds near the old policy: those of highest covariance."""
    kl_cov_coef: float = Field(1.0, gt=0)
    """Loss weight of the penalty that holds these tokens near their old log-probs (verl's `ppo_kl_coef`)."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of a round's tokens that enter the policy loss: those where the policy before the update has the highest
    entropy. The paper, "Beyond the 80/20 Rule", uses 0.2. Needs `old_logps: trainer`.
    """
    loss_agg_mode: LossAggMode = "sequence"
    """Aggregation of a step's loss. `sequence`: sum over the actions of each completion, then mean over
    completions (RLOO). `token_mean`: mean over all tokens (DAPO). `sequence_mean_token_mean`: mean over the tokens of
    each completion, then over completions (GRPO). `sequence_mean_token_sum`: sum over tokens, then mean over
    completions. `sequence_mean_token_sum_norm`: the same divided by `rollout.max_completion_length` (Dr. GRPO).
    """
    mask_truncated_completions: bool = False
    """Exclude completions without an end token from the loss. An optimizer step that has no completions left is
    skipped.
    """
    keep_truncated_in_baseline: bool = False
    """Still count a completion that `mask_truncated_completions` masks (with KL 0) in its siblings' baseline and in the
    denominator of the loss, as TRL does. Otherwise it is ignored everywhere.
    """
    filter_zero_variance: bool = False
    """Drop groups whose scores are all equal (after `reward_clip_range`), since they have no learning signal;
    `rollout.oversample` and `rollout.refill` sample replacements. An optimizer step that has no groups left is skipped.
    """
    mismatch: Mismatch = Mismatch()
    """Correction for the difference between the sampler's and the trainer's log-probs."""
    num_iterations: int = Field(1, ge=1)
    """Passes over the completions of a round (μ in the GRPO paper)."""
    steps_per_generation: int = Field(1, ge=1)
    """Optimizer steps in one pass: the completions of a round are split into this many mini-batches of whole groups."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        return presets.fill(values) if isinstance(values, dict) else values

    def _problems(self) -> Iterator[str]:
        yield from self._problems_of_estimator()
        if self.filter_zero_variance and self.reward_clip_range is not None and self.reward_normalization != "none":
            yield (
                "filter_zero_variance looks at scores before they are standardized, so it cannot tell which groups "
                f"reward_clip_range makes equal after reward_normalization: {self.reward_normalization}; leave one of "
                "the three out"
            )
        yield from self._problems_of_clip_and_kl()
        kept_by_preset = presets.PRESETS.get(str(self.preset), {}).get("keep_truncated_in_baseline", False)
        if not (self.mask_truncated_completions or kept_by_preset):
            reason = "without mask_truncated_completions; set that"
            yield from self.unused(("keep_truncated_in_baseline",), reason)
        if self.loss_agg_mode == "sequence" and not self.acts_on_tokens:
            yield from self.mismatch.problems_of_one_action()

    def _problems_of_estimator(self) -> Iterator[str]:
        """Refuses penalties in the reward with estimators that divide by the spread of a group.

        If all scores of a group are equal, its spread comes from the penalty alone, and dividing by it turns a penalty
        of 0.001 into an advantage of 1. GRPO (arXiv 2402.03300, section 4.1.1) and TRL keep the KL out of the rewards
        for this reason.
        """
        name, length = self.advantage, self.response_length
        if self.filter_zero_variance and name in estimators("batch_baseline"):
            yield (
                f"filter_zero_variance drops groups of equal scores, but with advantage: {name}, whose baseline is the "
                "round's, these have a signal too; set it to false, or use an estimator with the group's baseline, "
                "such as reinforce_pp_baseline"
            )
        if name not in estimators("divided", "of_success"):
            return
        if self.multi_objective_aggregation == "normalize_then_sum":
            yield (
                f"advantage: {name} cannot be used with multi_objective_aggregation: normalize_then_sum, which "
                "divides by the spread of each reward; use reinforce_pp_baseline, rloo or dr_grpo"
            )
        reason = (
            "divides by the spread of a group's rewards" if name in estimators("divided") else "needs scores 0 and 1"
        )
        if self.beta != 0 and self.kl.placement == "reward":
            yield (
                f"advantage: {name} {reason}, so kl.placement: reward would turn small differences of the KL into "
                "advantages; set kl.placement: loss, with kl.estimator: k3 or k2"
            )
        penalizes_length = length.overlong_cache is not None or length.target is not None
        if penalizes_length and not (name == "grpo" and self.filter_zero_variance):
            remedy = "set filter_zero_variance: true, as DAPO does, or " if name == "grpo" else ""
            yield (
                f"advantage: {name} {reason}, so response_length would turn differences in length alone into "
                f"advantages; {remedy}use another estimator"
            )
        if name in estimators("of_success"):
            for key in self.changed("reward_normalization", "reward_clip_range"):
                yield f"advantage: {name} {reason}, and {key} changes them; leave it out"

    def _problems_of_clip_and_kl(self) -> Iterator[str]:
        high = self.upper_epsilon
        if self.delta is not None and self.delta <= 1 + high:
            yield f"delta ({self.delta:g}) must exceed 1 + epsilon_high ({1 + high:g}), or epsilon_high never applies"
        values_tokens = self.values_by_teacher or self.kl.placement == "token_reward"
        for_tokens = {
            f"clip: {self.clip}": self.clip not in ("ppo", "cispo", "none"),
            "loss": self.loss is not None,
            "top_entropy_quantile": self.top_entropy_quantile < 1 and not self.acts_on_tokens,
            "teacher" if self.values_by_teacher else "kl.placement: token_reward": values_tokens
            and self.clip != "none",
        }
        for key in (key for key, is_set in for_tokens.items() if is_set and self.importance_sampling_level != "token"):
            yield f"{key} needs tokens as actions; set importance_sampling_level: token"
        chosen = presets.PRESETS.get(str(self.preset), {})
        bounds = tuple(key for key in ("epsilon", "epsilon_high", "delta") if getattr(self, key) != chosen.get(key))
        if self.loss is not None or self.clip in ("kl_cov", "sapo", "vespo", "none"):
            cause = f"clip: {self.clip}" if self.loss is None else "your own loss"
            yield from self.unused(bounds, f"with {cause}; use clip: ppo")
        if self.clip == "cispo" and self.epsilon_high is not None and "epsilon" in bounds:
            yield from self.unused(("epsilon",), "with clip: cispo beside epsilon_high; leave epsilon_high out")
        for key in self.changed(*type(self).model_fields):
            prefixes = ("sapo", "vespo", "clip_cov", "kl_cov")
            clip = next((name for name in prefixes if key.startswith(f"{name}_")), self.clip)
            if clip != self.clip:
                yield f"{key} works with clip: {clip} only, not with clip: {self.clip}"
        if self.clip_cov_lb >= self.clip_cov_ub:
            yield f"clip_cov_lb ({self.clip_cov_lb:g}) must be below clip_cov_ub ({self.clip_cov_ub:g})"
        if self.kl.target is not None and self.beta == 0:
            yield "kl.target multiplies beta by a factor each round, which leaves 0 at 0; set beta above 0"

    @property
    def upper_epsilon(self) -> float:
        """Upper clip range of the ratio: `epsilon_high`, or `epsilon` if it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def is_one_step(self) -> bool:
        """True if a round is one optimizer step; the log-probs of that step are then those of π_old."""
        return self.num_iterations * self.steps_per_generation == 1

    @property
    def needs_old_pass(self) -> bool:
        """True if the trainer computes log-probs of π_old before the first step.

        They are needed for a KL in the reward or to a teacher, for several steps that are compared with π_old, and to
        select tokens by entropy.
        """
        if self.old_logps == "sampler":
            return False
        in_reward = (self.beta != 0 and self.kl.placement != "loss") or self.values_by_teacher
        compared = self.clip != "none" or self.mismatch.correction != "none"
        chooses = self.clip == "clip_cov" or self.top_entropy_quantile < 1
        return in_reward or chooses or (compared and not self.is_one_step)

    @property
    def teacher_sources(self) -> dict[str, ModelSource]:
        """The teacher models by name, if any; a single one has an empty name."""
        return {} if self.teacher is None else self.teacher.sources

    @property
    def teacher_top_k(self) -> int:
        """`teacher.top_k`; 0 if there is none."""
        return 0 if self.teacher is None else self.teacher.top_k or 0

    @property
    def values_by_teacher(self) -> bool:
        """True if the KL to a teacher is in the advantages; with `top_k` it is in the loss."""
        return self.teacher is not None and self.teacher.top_k is None

    @property
    def acts_on_tokens(self) -> bool:
        """True if the loss has one term per token rather than one per completion."""
        return self.importance_sampling_level == "token" or self.clip != "ppo"
