"""Sections inside `algorithm`: the KL penalty, the correction of the sampler's log-probs, penalties on length."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rloo_pipeline.config.section import Section


class KL(Section):
    """KL penalty that keeps the policy near the reference policy (policy 0). Its coefficient is `algorithm.beta`."""

    placement: Literal["reward", "token_reward", "loss"] = "reward"
    """Place of the penalty. `reward`: subtracted from each completion's reward before the baseline (the RLOO
    paper). `token_reward`: subtracted from each token's reward-to-go after the baseline. `loss`: added to the loss as a
    term with its own gradient (GRPO).
    """
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimator of the KL from sampled tokens. In the reward use `k1`: near the reference policy, `k2` and
    `k3` have almost no gradient there. In the loss use `k2` or `k3`: `k1` does not pull towards the reference there.
    """
    bias_correction: bool = False
    """Multiply the KL term in the loss by the policy ratio (DeepSeek-V3.2; TRL's `use_bias_correction_kl`). Needs
    `placement: loss`.
    """
    target: float | None = Field(None, gt=0)
    """Target for the mean KL of a completion, in nats. After each round `beta` is adjusted towards it (Ziegler et al.
    2019). Without a target `beta` is constant. Not with `rollout.lag`.
    """
    gain: float = Field(0.1, gt=0, lt=5)
    """Speed of that adjustment: one round changes `beta` by at most a fifth of this fraction (0.1: 2%)."""


class Mismatch(Section):
    """Correction for the difference between the sampler's (vLLM) and the trainer's log-probs of the same tokens."""

    correction: Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "sequence_mean_mis"] = "none"
    """Importance weights (trainer over sampler), per token or per completion. `tis` truncates a weight at the upper
    threshold; `mis` drops what is outside the thresholds. `token_mis` with both thresholds is IcePop's two-sided mask.
    With `rollout.lag` the weights are for the older policy that sampled too, and the default is not `none`: see there.
    `sequence_mean_mis` drops a completion when the geometric mean of its token weights is outside the thresholds, and
    gives the others weight 1; unlike a product over tokens, this mean does not drift with length.
    """
    max: float | None = Field(2.0, gt=0)
    """Upper threshold of a weight. With `null` a weight is only bounded by e^20."""
    min: float | None = Field(None, ge=0)
    """Lower threshold of a weight. `sequence_mean_mis` needs both thresholds close to 1, for example 0.98 and 1.02."""


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
