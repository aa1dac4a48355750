"""Sections inside `algorithm`: KL penalty, correction for the sampler's log-probs, length penalties."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rloo_pipeline.config.section import Section

KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis", "sequence_mean_mis"]


class KL(Section):
    """KL penalty that keeps the policy near the reference policy (policy 0). Its coefficient is `algorithm.beta`."""

    placement: Literal["reward", "token_reward", "loss"] = "reward"
    """Placement of the penalty. `reward`: subtracted from each completion's reward before the baseline (the RLOO
    paper). `token_reward`: subtracted from each token's reward-to-go after the baseline. `loss`: added to the loss as a
    term with its own gradient (GRPO).
    """
    estimator: KlEstimator = "k1"
    """Schulman's estimator of the KL from sampled tokens. In the reward, use `k1`; near the reference policy, `k2` and
    `k3` have almost no gradient there. In the loss, use `k2` or `k3`; without `bias_correction`, `k1` does not pull
    towards the reference there.
    """
    bias_correction: bool = False
    """Multiply the KL term in the loss by the policy ratio (DeepSeek-V3.2; TRL's `use_bias_correction_kl`). Needs
    `placement: loss`.
    """
    target: float | None = Field(None, gt=0)
    """Target for the mean KL of a completion, in nats. After each round `beta` is adjusted towards it (Ziegler et al.
    2019). Without a target `beta` is constant. Not with keys of `rollout` that sample from a different distribution:
    `lag`, `token_budget`, `top_p`, `top_k`, `min_p`, and masks in `generation_kwargs`.
    """
    gain: float = Field(0.1, gt=0, lt=5)
    """Speed of that adjustment: one round changes `beta` by at most a fifth of this fraction (with 0.1, by 2%)."""


class Reject(Section):
    """Drops tokens or completions by their importance weights, in addition to a correction that weights the loss."""

    by: Literal["token", "sequence", "sequence_mean"] = "sequence_mean"
    """The weight that is compared with the thresholds: that of a token, of a completion (the product over its tokens),
    or the geometric mean over a completion's tokens. Anything outside is dropped.
    """
    min: float | None = Field(None, ge=0)
    """Lower threshold."""
    max: float | None = Field(None, gt=0)
    """Upper threshold."""

    def _problems(self) -> Iterator[str]:
        yield from _thresholds(self.min, self.max, True, self.by == "sequence_mean")


def _thresholds(low: float | None, high: float | None, drops: bool, is_mean: bool) -> Iterator[str]:
    """A sentence if thresholds do not fit a rule.

    Args:
        low: the lower one.
        high: the upper one.
        drops: True if the rule drops what is outside, and does not truncate it.
        is_mean: True if the weight is the geometric mean over a completion, which is close to 1.
    """
    if drops and is_mean and (low is None or high is None or not low < 1 < high):
        yield "completions are dropped on both sides of 1; set min and max below and above 1, for example 0.98 and 1.02"
    elif drops and low is None and high is None:
        yield "needs a threshold; set min or max"
    elif low is not None and high is not None and low > high:
        yield f"min ({low:g}) exceeds max ({high:g})"


class Mismatch(Section):
    """Correction for the difference between the sampler's (vLLM) and the trainer's log-probs of the same tokens."""

    correction: Literal["none", Correction] = "none"
    """Importance weights (trainer over sampler), per token or per completion. `tis` truncates a weight at the upper
    threshold; `mis` drops tokens or completions outside the thresholds. `token_mis` with both thresholds is IcePop's
    two-sided mask. With `rollout.lag` the weights also correct for the older policy that sampled, and the default is
    not `none`; see there. `sequence_mean_mis` drops a completion when the geometric mean of its token weights is
    outside the thresholds, and gives the others weight 1; unlike a product over tokens, this mean does not drift with
    length.
    """
    max: float | None = Field(2.0, gt=0)
    """Upper threshold of a weight. With `null`, a weight is bounded only by e^20."""
    min: float | None = Field(None, ge=0)
    """Lower threshold of a weight. `sequence_mean_mis` needs both thresholds close to 1, for example 0.98 and 1.02."""
    reject: Reject | None = None
    """A second rule that drops by its own thresholds and keeps the weights of the rest, for example `{correction:
    token_tis, reject: {by: sequence_mean, min: 0.98, max: 1.02}}`.
    """

    @property
    def acts_on_tokens(self) -> bool:
        """True if tokens of one completion can have different weights."""
        return self.correction.startswith("token") or (self.reject is not None and self.reject.by == "token")

    def _problems(self) -> Iterator[str]:
        correction, reject = self.correction, self.reject
        if correction == "none":
            for key in self.changed("min", "max", "reject"):
                yield f"{key} belongs to a correction, but none is set; set correction, or leave {key} out"
        elif reject is not None and correction == f"{reject.by}_mis":
            yield f"correction: {correction} drops by the same weight as reject; leave one out"
        yield from _thresholds(self.min, self.max, correction.endswith("mis"), correction == "sequence_mean_mis")

    def problems_of_one_action(self) -> Iterator[str]:
        """A sentence for each weight of tokens in a loss that has one term per completion."""
        if self.correction.startswith("token"):
            yield (
                f"mismatch.correction: {self.correction} weights tokens, but here a completion is one action; use "
                f"sequence_mean_mis or {self.correction.replace('token', 'sequence')}"
            )
        if self.reject is not None and self.reject.by == "token":
            yield "mismatch.reject.by: token drops tokens, but here a completion is one action; use sequence_mean"


class ResponseLength(Section):
    """Length penalties in the reward, by the completion's length in tokens. Both penalties can be used together. In
    completions of several turns, `target` counts the tokens that the model sampled, and `overlong_cache` all tokens, as
    `rollout.max_completion_length` does.
    """

    overlong_cache: int | None = Field(None, ge=1)
    """Soft over-long penalty (DAPO): the penalty grows linearly over the last `overlong_cache` tokens before
    `rollout.max_completion_length`, from 0 to `overlong_penalty`. Off by default.
    """
    overlong_penalty: float = Field(1.0, ge=0)
    """Reward that a completion of maximum length loses."""
    target: int | None = Field(None, ge=1)
    """Desired completion length in tokens. Off by default."""
    target_penalty: float = Field(1.0, ge=0)
    """Reward lost in proportion to the distance from `target`: `target_penalty · |length − target| / target`."""
