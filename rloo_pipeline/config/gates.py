"""Section `gates`: what a run is watched for after each round; diagnosis/diagnosis.py looks for it.

A gate changes no result, so a change of one runs nothing again: it holds for the rounds that are judged from then on.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rloo_pipeline.config.section import Section


class _Gate(Section):
    @field_validator("action", mode="before", check_fields=False)
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value


class Gate(_Gate):
    """One symptom."""

    action: Literal["off", "warn", "stop"] = "warn"
    """What happens where it shows: nothing, a line on the terminal, or the run ends after the round."""


class Unstable(Gate):
    """High variance: steps of very different sizes."""

    ratio: float = Field(5.0, gt=1)
    """A gradient norm so many times the median of earlier rounds is a jump; two jumps within five rounds are unstable.
    """


class KlExplosion(Gate):
    """The policy leaves the reference."""

    max_kl: float = Field(0.5, gt=0)
    """Mean KL in nats a token above which it has left."""
    growth: float = Field(4.0, gt=1)
    """Or so many times the KL of three rounds before, once it is over half of max_kl."""


class RewardCollapse(Gate):
    """All generations of a prompt alike, though not by being right."""

    zero_std: float = Field(0.8, gt=0, le=1)
    """Share of groups with one and the same reward, over three rounds, in which little is left to learn from."""
    entropy: float = Field(0.1, gt=0, lt=1)
    """Or half of the groups so, and entropy below this share of the first rounds'."""


class RewardHacking(Gate):
    """The reward rises while what it stands for falls."""

    effect: float = Field(0.2, gt=0)
    """Rise of the reward, and fall of a monitor, in standard deviations of the first rounds' completions."""
    monitors: list[str] | None = None
    """Reward functions that should not fall; those of weight 0 where not given."""


class LengthExplosion(Gate):
    """Completions grow without the reward."""

    ratio: float = Field(2.0, gt=1)
    """Mean length as a multiple of the first rounds'."""
    clipped: float = Field(0.2, gt=0, le=1)
    """Share of truncated completions from which on growth is too much even where the reward rises."""


class EmptyOutputs(Gate):
    """Completions shrink to nothing."""

    ratio: float = Field(0.1, gt=0, lt=1)
    """Mean length as a share of the first rounds'."""
    min_length: float = Field(2.0, ge=0)
    """Or mean length in tokens, the end token included."""


class ColdStart(Gate):
    """No signal from the first round on."""

    rounds: int = Field(3, ge=1)
    """Rounds without signal before it is said."""
    zero_std: float = Field(0.9, gt=0, le=1)
    """Share of groups with one and the same reward in each of them."""


class SamplerMismatch(Gate):
    """Sampler and trainer give the same tokens different log-probs."""

    logp_difference: float = Field(0.1, gt=0)
    """Mean absolute difference in nats a token; bfloat16 alone makes 0.01 to 0.04."""
    kl: float = Field(0.01, gt=0)
    """Or KL of the sampler from the trainer in nats a token (k3); bfloat16 alone makes 0.0001 to 0.002."""
    outside_band: float = Field(0.02, gt=0, lt=1)
    """Or the share of tokens whose importance weight is outside 0.5 to 2."""


class NoMovement(Gate):
    """The policy is still the warm start."""

    rounds: int = Field(10, ge=1)
    """Rounds before it is said; of a run that is over, its last one will do."""
    kl: float = Field(2e-4, gt=0)
    """KL from policy 0 in nats a token up to which the policy has not moved. With algorithm.beta 0 it is known of
    evaluated policies alone.
    """
    effect: float = Field(0.1, gt=0)
    """Change of the reward, in standard deviations of the first rounds' completions, up to which it has not moved."""


class Memory(_Gate):
    """A stage ran out of memory, as its log says. It failed by itself, so there is nothing to stop."""

    action: Literal["off", "warn"] = "warn"
    """Whether `rloo diagnose` and the report look for it."""


class Gates(Section):
    """What a run is watched for after each round: off, warn or stop. `rloo diagnose RUN` prints it at any time."""

    unstable: Unstable = Unstable()
    """High variance of the gradient."""
    kl_explosion: KlExplosion = KlExplosion()
    """KL to the reference policy."""
    reward_collapse: RewardCollapse = RewardCollapse()
    """Generations that are all alike."""
    reward_hacking: RewardHacking = RewardHacking()
    """Reward against monitors and evaluations."""
    length_explosion: LengthExplosion = LengthExplosion()
    """Long completions."""
    empty_outputs: EmptyOutputs = EmptyOutputs()
    """Short completions."""
    cold_start: ColdStart = ColdStart()
    """The first rounds."""
    sampler_mismatch: SamplerMismatch = SamplerMismatch()
    """Sampler against trainer."""
    no_movement: NoMovement = NoMovement()
    """A policy that stays as it was."""
    memory: Memory = Memory()
    """Out of memory."""
