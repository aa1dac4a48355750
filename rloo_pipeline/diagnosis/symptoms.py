"""What can go wrong with a run, one function a symptom: the run up to a round in, evidence out, or None where healthy.

Thresholds are keys of `gates`, under the function's name. A start is the median of the first three rounds, which is
what a run is compared with; a metric that does not exist in a round (null) is no evidence of anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_pipeline.config import gates
from rloo_pipeline.config.section import JSON

Metrics = Mapping[str, float | None]
START = 3
"""Rounds that count as the start, and as the latest."""
JUMPS, SPAN = 2, 5
"""So many jumps of the gradient within so many rounds are instability; one is a bad batch."""
ALIKE = 0.5
"""Share of groups with one and the same reward below which a low entropy is no collapse."""
NOTHING_TO_LEARN = 0.9
"""Share of groups with one and the same reward from which on no learning rate would move anything."""
LENGTH, ZERO_STD = "completions/mean_length", "frac_reward_zero_std"


class Seen(NamedTuple):
    """A run up to and with some round."""

    rounds: Sequence[Metrics]
    """metrics.json of each."""
    monitors: Sequence[str] = ()
    """Reward functions that should not fall."""
    evaluations: Mapping[int, JSON] = {}
    """summary.json of evaluations by the policy's number."""
    out_of_memory: Mapping[int, str] = {}
    """What a log of a round's stages says of it, by round."""
    planned: int | None = None
    """The run's last round; None where that is not known."""

    @property
    def round(self) -> int:
        """The latest round."""
        return int(self.rounds[-1]["round"] or 0)

    def now(self, metric: str) -> float | None:
        """The latest round's value."""
        return self.rounds[-1].get(metric)

    def known(self, metric: str) -> list[float]:
        """The values of all rounds that have one."""
        return [value for found in self.rounds if (value := found.get(metric)) is not None]

    def start(self, metric: str) -> float | None:
        """The median of the first rounds; None until they are over."""
        values = self.known(metric)
        return statistics.median(values[:START]) if len(values) > START else None

    def latest(self, metric: str) -> float | None:
        """The mean of the latest rounds."""
        values = [value for found in self.rounds[-START:] if (value := found.get(metric)) is not None]
        return statistics.fmean(values) if values else None

    def rise(self, metric: str, spread: str) -> float | None:
        """From the start to the latest rounds, in standard deviations of the start's completions."""
        start, latest, unit = self.start(metric), self.latest(metric), self.start(spread)
        return None if start is None or latest is None or not unit else (latest - start) / unit


class Known(NamedTuple):
    """A symptom that can be looked for."""

    title: str
    cure: str
    evidence: Callable[[Seen, Any], str | None]
    """Of a run and the symptom's section of `gates`."""


REGISTRY: dict[str, Known] = {}


def symptom(title: str, cure: str) -> Callable[[Callable[[Seen, Any], str | None]], Callable[[Seen, Any], str | None]]:
    """Registers a function under its name, which is the key of its section in `gates`."""

    def register(function: Callable[[Seen, Any], str | None]) -> Callable[[Seen, Any], str | None]:
        REGISTRY[function.__name__] = Known(title, cure, function)
        return function

    return register


@symptom(
    "unstable",
    "raise rollout.num_generations to 6 or 8, lower update.learning_rate, raise algorithm.beta",
)
def unstable(seen: Seen, gate: gates.Unstable) -> str | None:
    """Gradient norms jump, and not just once."""
    norms = seen.known("grad_norm")
    places = range(max(START, len(norms) - SPAN), len(norms))
    jumps = [norms[place] / usual for place in places if (usual := statistics.median(norms[:place])) > 0]
    large = [jump for jump in jumps if jump >= gate.ratio]
    if len(large) < JUMPS:
        return None
    return f"{len(large)} of the last {len(jumps)} gradient norms are up to {max(large):.0f} times the usual one"


@symptom("KL explosion", "raise algorithm.beta to 0.1, lower update.learning_rate")
def kl_explosion(seen: Seen, gate: gates.KlExplosion) -> str | None:
    """The KL to the reference is large, or grows by leaps."""
    kl, values = seen.now("kl"), seen.known("kl")
    if kl is None:
        return None
    if kl > gate.max_kl:
        return f"KL {kl:.3g} nats a token, over {gate.max_kl:g}"
    before = values[-1 - START] if len(values) > START else None
    if before and kl > gate.max_kl / 2 and kl > gate.growth * before:
        return f"KL {kl:.3g} nats a token, {kl / before:.1f} times that of {START} rounds before"
    return None


@symptom(
    "reward collapse",
    "raise rollout.temperature, bring more diverse prompts, rewards with more steps; go on from an earlier policy",
)
def reward_collapse(seen: Seen, gate: gates.RewardCollapse) -> str | None:
    """The generations of a prompt are all alike, and that is not because nearly all are right."""
    zero, entropy, first = seen.latest(ZERO_STD), seen.latest("entropy"), seen.start("entropy")
    if zero is None or len(seen.rounds) <= START or _solved(seen):
        return None
    if zero >= gate.zero_std and min(seen.known(ZERO_STD)) < gate.zero_std:
        return f"{zero:.0%} of the groups have one and the same reward"
    if zero >= ALIKE and entropy is not None and first and entropy < gate.entropy * first:
        fallen = f"entropy fell from {first:.2g} to {entropy:.2g} nats a token"
        return f"{zero:.0%} of the groups have one and the same reward, and {fallen}"
    return None


def _solved(seen: Seen) -> bool:
    """Whether groups are alike since the rewards of all prompts are: at their best, with little spread left."""
    rewards, spread, first = seen.known("reward"), seen.latest("reward_std"), seen.start("reward_std")
    latest = seen.latest("reward")
    if spread is None or first is None or latest is None:
        return False
    best = max(statistics.fmean(rewards[i : i + START]) for i in range(len(rewards) - START + 1))
    return latest >= best - 0.1 * first and spread <= 0.6 * first


@symptom(
    "reward hacking",
    "read completions of high reward, give what they neglect a weight in rewards, raise algorithm.beta",
)
def reward_hacking(seen: Seen, gate: gates.RewardHacking) -> str | None:
    """The reward went up while a monitor, or accuracy on held-out prompts, went down."""
    if len(seen.rounds) < 2 * START:
        return None
    rise = seen.rise("reward", "reward_std")
    if rise is None or rise < gate.effect:
        return None
    for name in gate.monitors if gate.monitors is not None else seen.monitors:
        fall = seen.rise(f"rewards/{name}/mean", f"rewards/{name}/std")
        if fall is not None and fall <= -gate.effect:
            first, latest = seen.start(f"rewards/{name}/mean"), seen.latest(f"rewards/{name}/mean")
            return f"the reward rose by {rise:.1f} standard deviations, {name} fell from {first:.3g} to {latest:.3g}"
    if worse := _worse(seen):
        return f"the reward rose by {rise:.1f} standard deviations, {worse}"
    return None


def _worse(seen: Seen) -> str | None:
    """Held-out accuracy of the latest evaluated policy whole below that of the first: their intervals do not meet."""
    numbers = sorted(number for number in seen.evaluations if number <= seen.round)
    if len(numbers) < 2:
        return None
    first, latest = seen.evaluations[numbers[0]], seen.evaluations[numbers[-1]]
    if latest["ci95"][1] >= first["ci95"][0]:
        return None
    return f"held-out accuracy fell from {first['accuracy']:.1%} to {latest['accuracy']:.1%} (policy {numbers[-1]})"


@symptom(
    "length explosion",
    "raise algorithm.beta, penalize length (rewards.length:overlong_reward, algorithm.response_length), lower "
    "update.learning_rate",
)
def length_explosion(seen: Seen, gate: gates.LengthExplosion) -> str | None:
    """Completions got much longer, and are cut off or no better."""
    start, latest, clipped = seen.start(LENGTH), seen.latest(LENGTH), seen.latest("completions/clipped_ratio")
    if start is None or latest is None or latest < gate.ratio * start:
        return None
    grown = f"completions have {latest:.0f} tokens, {start:.0f} in the first rounds"
    if clipped is not None and clipped >= gate.clipped:
        return f"{grown}; {clipped:.0%} are cut off"
    rise = seen.rise("reward", "reward_std")
    return f"{grown}; the reward did not rise" if rise is not None and rise < 0.1 else None


@symptom(
    "empty outputs",
    "raise algorithm.beta, lower update.learning_rate, look for a reward that pays for saying nothing",
)
def empty_outputs(seen: Seen, gate: gates.EmptyOutputs) -> str | None:
    """Completions end at once."""
    start, latest = seen.start(LENGTH), seen.latest(LENGTH)
    if latest is not None and latest <= gate.min_length:
        return f"completions have {latest:.1f} tokens"
    if start is not None and latest is not None and latest <= gate.ratio * start:
        return f"completions have {latest:.1f} tokens, {start:.0f} in the first rounds"
    return None


@symptom(
    "cold start",
    "demonstrations first (warmstart.sft), easier prompts, a reward with steps, more rollout.num_generations",
)
def cold_start(seen: Seen, gate: gates.ColdStart) -> str | None:
    """No round so far had groups to learn from."""
    zero = seen.known(ZERO_STD)
    if len(zero) < gate.rounds or min(zero) < gate.zero_std:
        return None
    return f"in none of {len(zero)} rounds did more than {1 - min(zero):.0%} of the groups differ in reward"


@symptom(
    "sampler-trainer mismatch",
    "the same dtype for both (model.dtype), then algorithm.mismatch.correction: token_tis where a token is an action, "
    "else sequence_mean_mis with min and max near 1",
)
def sampler_mismatch(seen: Seen, gate: gates.SamplerMismatch) -> str | None:
    """What was sampled is not what is trained on, token by token: whole completions are far apart by length alone."""
    gap, kl = seen.now("sampling/sampling_logp_difference/mean"), seen.now("sampling/kl")
    outside = seen.now("sampling/outside_band")
    if gap is not None and gap > gate.logp_difference:
        return f"log-probs differ by {gap:.2g} nats a token on average"
    if kl is not None and kl > gate.kl:
        return f"the sampler's KL from the trainer is {kl:.2g} nats a token"
    if outside is not None and outside > gate.outside_band:
        return f"{outside:.1%} of the tokens are less than half or more than twice as likely for the trainer"
    return None


@symptom(
    "no movement",
    "raise update.learning_rate 3 to 10 times (LoRA takes about ten times that of full training), lower algorithm.beta",
)
def no_movement(seen: Seen, gate: gates.NoMovement) -> str | None:
    """There are groups to learn from, and neither the policy nor its reward is elsewhere than at the start."""
    over = seen.round == seen.planned and seen.round in seen.evaluations
    if len(seen.rounds) < gate.rounds and not over:
        return None
    kl, change = _distance(seen), _change(seen)
    taught = [found for found in seen.rounds if found.get("trained_completions") != 0]
    zero = [value for found in taught if (value := found.get(ZERO_STD)) is not None]
    if not zero or statistics.fmean(zero) >= NOTHING_TO_LEARN or kl is None or change is None:
        return None
    if abs(kl) > gate.kl or abs(change) > gate.effect:
        return None
    gain = f", held-out accuracy by {100 * gained:+.1f} points" if (gained := _gained(seen)) is not None else ""
    moved = f"the reward moved by {change:+.2f} standard deviations{gain}"
    return f"after {seen.round} rounds the KL from policy 0 is {kl:.1g} nats a token, and {moved}"


def _distance(seen: Seen) -> float | None:
    """KL of the policy from policy 0 in nats a token: as evaluated, else of the latest rounds' completions."""
    found = (seen.evaluations.get(seen.round) or {}).get("distance")
    return float(found["kl"]) if found else seen.latest("kl")


def _change(seen: Seen) -> float | None:
    """How far the reward is from its start, in standard deviations of the start's completions."""
    rewards, spread = seen.known("reward"), seen.known("reward_std")
    if len(rewards) > START:
        return seen.rise("reward", "reward_std")
    return (rewards[-1] - rewards[0]) / spread[0] if rewards and spread and spread[0] else None


def _gained(seen: Seen) -> float | None:
    """Held-out accuracy of this round's policy less that of policy 0."""
    first, latest = seen.evaluations.get(0), seen.evaluations.get(seen.round)
    return None if first is None or latest is None else float(latest["accuracy"] - first["accuracy"])


@symptom(
    "out of memory",
    "lower deepspeed.max_tokens_per_micro_batch or rollout.max_completion_length, "
    "deepspeed.gradient_checkpointing: true, a higher deepspeed.zero_stage; `rloo plan` says what fits",
)
def memory(seen: Seen, _gate: gates.Memory) -> str | None:
    """A stage of this round said that it had no memory left."""
    return seen.out_of_memory.get(seen.round)
