"""Section `gates`: thresholds of the symptoms that judging/symptoms.py looks for after each round.

Gates change no result, so a new threshold reruns nothing. It applies to the rounds that are judged from then on.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rloo_pipeline.config.section import Section

OFF = BeforeValidator(lambda action: "off" if action is False else action)
"""YAML parses an unquoted `off` as false."""


class Gate(Section):
    """The reaction to one symptom."""

    action: Annotated[Literal["off", "warn", "stop"], OFF] = "warn"
    """`off`: do not look for it. `warn`: print a line on the terminal. `stop`: end the run after this round."""


class Unstable(Gate):
    """Unstable training: gradient norms that jump."""

    ratio: float = Field(5.0, gt=1)
    """A gradient norm at least this many times the median of earlier rounds is a jump. Two jumps within five rounds are
    the symptom.
    """


class KlExplosion(Gate):
    """The policy moves too far from the reference policy."""

    max_kl: float = Field(0.5, gt=0)
    """Maximum mean KL per token, in nats."""
    growth: float = Field(4.0, gt=1)
    """Or: maximum growth of the KL over three rounds, as a factor, once the KL exceeds half of `max_kl`."""


class RewardCollapse(Gate):
    """The completions of a prompt all get the same reward, and not because they are right."""

    zero_std: float = Field(0.8, gt=0, le=1)
    """Fraction of groups without differences in reward, averaged over three rounds, from which this is a symptom."""
    entropy: float = Field(0.1, gt=0, lt=1)
    """Or: half of the groups are without differences and the entropy is below this fraction of that of the first
    rounds.
    """


class RewardHacking(Gate):
    """The reward rises while a monitor or the held-out accuracy falls."""

    effect: float = Field(0.2, gt=0)
    """Rise of the reward, and fall of a monitor, from which this is a symptom; in standard deviations over the
    completions of the first rounds.
    """
    monitors: list[str] | None = None
    """Names of rewards that should not fall. Default: those of weight 0."""


class LengthExplosion(Gate):
    """Completions get longer while the reward does not rise."""

    ratio: float = Field(2.0, gt=1)
    """Mean length from which this is a symptom, as a multiple of that of the first rounds."""
    clipped: float = Field(0.2, gt=0, le=1)
    """Fraction of truncated completions from which this is a symptom even if the reward rises."""


class EmptyOutputs(Gate):
    """Completions become empty or nearly so."""

    ratio: float = Field(0.1, gt=0, lt=1)
    """Mean length up to which this is a symptom, as a fraction of that of the first rounds."""
    min_length: float = Field(2.0, ge=0)
    """Or: mean length up to which this is a symptom, in tokens including the end token."""


class ColdStart(Gate):
    """No learning signal in any round so far."""

    rounds: int = Field(3, ge=1)
    """Number of rounds without signal from which this is a symptom."""
    zero_std: float = Field(0.9, gt=0, le=1)
    """A round has no signal if at least this fraction of its groups is without differences in reward."""


class SamplerMismatch(Gate):
    """Sampler (vLLM) and trainer give the same tokens different log-probs."""

    logp_difference: float = Field(0.1, gt=0)
    """Maximum mean absolute difference per token, in nats. Rounding in bfloat16 alone causes 0.01 to 0.04."""
    kl: float = Field(0.01, gt=0)
    """Or: maximum KL between sampler and trainer per token, in nats (k3). Rounding in bfloat16 alone causes 0.0001 to
    0.002.
    """
    outside_band: float = Field(0.02, gt=0, lt=1)
    """Or: maximum fraction of tokens whose importance weight is below 0.5 or above 2."""


class StaleRollouts(Gate):
    """The policy has moved far from the older one that sampled (`rollout.lag`)."""

    effective_sample_size: float = Field(0.5, gt=0, lt=1)
    """Minimum effective sample size of the tokens' importance weights, as a share of the tokens (Kong 1992)."""


class ExpertCollapse(Gate):
    """A mixture of experts sends its tokens to ever fewer experts."""

    entropy: float = Field(0.5, gt=0, lt=1)
    """Minimum entropy of the worst layer, as a fraction of that of the first rounds."""


class NoMovement(Gate):
    """The policy is still close to the warm start."""

    rounds: int = Field(10, ge=1)
    """Number of rounds after which this can be a symptom. A shorter run is judged after its last round."""
    kl: float = Field(2e-4, gt=0)
    """KL from policy 0 per token, in nats, up to which the policy counts as unmoved. With `algorithm.beta: 0` it is
    only computed for evaluated policies.
    """
    effect: float = Field(0.1, gt=0)
    """Change of the reward up to which it counts as unmoved, in standard deviations over the completions of the first
    rounds.
    """


class Memory(Section):
    """A stage ran out of memory, according to its log. The stage has failed, so this gate has no `stop`."""

    action: Annotated[Literal["off", "warn"], OFF] = "warn"
    """`warn`: `rloo diagnose` and the report show it. `off`: they do not look for it."""


class UnusedTools(Gate):
    """The model has tools and calls none, or never one of them."""

    calls: float = Field(0.0, ge=0)
    """Calls of a completion, averaged over three rounds, up to which this is a symptom."""


class Gates(Section):
    """Symptoms that a gate looks for after each round, and the action for each. `rloo diagnose RUN` prints them at any
    time.
    """

    unstable: Unstable = Unstable()
    """Gradient norms that jump."""
    kl_explosion: KlExplosion = KlExplosion()
    """KL from the reference policy."""
    reward_collapse: RewardCollapse = RewardCollapse()
    """Groups without differences in reward."""
    reward_hacking: RewardHacking = RewardHacking()
    """A reward that rises while monitors or held-out accuracy fall."""
    length_explosion: LengthExplosion = LengthExplosion()
    """Completions that get longer."""
    empty_outputs: EmptyOutputs = EmptyOutputs()
    """Completions that become empty."""
    cold_start: ColdStart = ColdStart()
    """First rounds without learning signal."""
    sampler_mismatch: SamplerMismatch = SamplerMismatch()
    """Sampler and trainer log-probs that differ."""
    stale_rollouts: StaleRollouts = StaleRollouts()
    """Rollouts of a policy that is too old."""
    expert_collapse: ExpertCollapse = ExpertCollapse()
    """Experts of a mixture that no longer get tokens."""
    no_movement: NoMovement = NoMovement()
    """A policy that hardly changes."""
    unused_tools: UnusedTools = UnusedTools()
    """Tools that no completion calls."""
    memory: Memory = Memory()
    """Stages that ran out of memory."""
