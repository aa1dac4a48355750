"""Symptoms of a failing run: one function per symptom, which returns its evidence as text, or None.

Each function judges a run up to some round. Its thresholds are the section of `gates` with the function's name. Most
compare the latest rounds with the run's start, the median of its first three rounds. A metric that does not exist in a
round (null) is never evidence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from rloo_pipeline.config import gates
from rloo_pipeline.judging.history import START, RoundHistory

JUMPS, SPAN = 2, 5
"""Jumps of the gradient norm within `SPAN` rounds that count as instability; a single jump is a bad batch."""
MANY_EQUAL = 0.5
"""Share of groups with identical rewards from which a low entropy is a collapse."""
NOTHING_TO_LEARN = 0.9
"""Share of groups with identical rewards from which no learning rate would move the policy."""
LENGTH, ZERO_STD = "completions/mean_length", "frac_reward_zero_std"

Evidence = Callable[[RoundHistory, Any], str | None]
"""Takes a run and the symptom's section of `gates`; returns what shows the symptom."""


class SymptomRule(NamedTuple):
    """A symptom that `diagnose` looks for."""

    title: str
    cure: str
    evidence: Evidence | None
    """None where the evidence is in logs."""


REGISTRY: dict[str, SymptomRule] = {}


def symptom(title: str, cure: str) -> Callable[[Evidence], Evidence]:
    """Registers a function under its name, which is the key of its section in `gates`."""

    def register(function: Evidence) -> Evidence:
        REGISTRY[function.__name__] = SymptomRule(title, cure, function)
        return function

    return register


@symptom(
    "unstable",
    "raise rollout.num_generations to 6 or 8, lower update.learning_rate, raise algorithm.beta",
)
def unstable(history: RoundHistory, gate: gates.Unstable) -> str | None:
    """The gradient norm jumps repeatedly."""
    norms = history.values("grad_norm")
    places = range(max(START, len(norms) - SPAN), len(norms))
    jumps = [norms[place] / usual for place in places if (usual := statistics.median(norms[:place])) > 0]
    large = [jump for jump in jumps if jump >= gate.ratio]
    if len(large) < JUMPS:
        return None
    return f"{len(large)} of the last {len(jumps)} gradient norms are up to {max(large):.0f} times the usual one"


@symptom("KL explosion", "raise algorithm.beta to 0.1, lower update.learning_rate")
def kl_explosion(history: RoundHistory, gate: gates.KlExplosion) -> str | None:
    """The KL to the reference is large or grows fast."""
    kl, values = history.now("kl"), history.values("kl")
    if kl is None:
        return None
    if kl > gate.max_kl:
        return f"KL {kl:.3g} nats per token, over {gate.max_kl:g}"
    before = values[-1 - START] if len(values) > START else None
    if before and kl > gate.max_kl / 2 and kl > gate.growth * before:
        return f"KL {kl:.3g} nats per token, {kl / before:.1f} times that of {START} rounds before"
    return None


@symptom(
    "reward collapse",
    "raise rollout.temperature, use more diverse prompts or a reward with more steps; resume from an earlier policy",
)
def reward_collapse(history: RoundHistory, gate: gates.RewardCollapse) -> str | None:
    """The completions of most prompts get identical rewards although the prompts are not solved."""
    zero, entropy, first = history.latest(ZERO_STD), history.latest("entropy"), history.start("entropy")
    if zero is None or len(history.rounds) <= START or _solved(history):
        return None
    if zero >= gate.zero_std and min(history.values(ZERO_STD)) < gate.zero_std:
        return f"{zero:.0%} of the groups have identical rewards"
    if zero >= MANY_EQUAL and entropy is not None and first and entropy < gate.entropy * first:
        drop = f"entropy fell from {first:.2g} to {entropy:.2g} nats per token"
        return f"{zero:.0%} of the groups have identical rewards, and {drop}"
    return None


def _solved(history: RoundHistory) -> bool:
    """True if rewards are equal because they are near their best everywhere, with little spread left."""
    rewards, spread, first = history.values("reward"), history.latest("reward_std"), history.start("reward_std")
    latest = history.latest("reward")
    if spread is None or first is None or latest is None:
        return False
    best = max(statistics.fmean(rewards[i : i + START]) for i in range(len(rewards) - START + 1))
    return latest >= best - 0.1 * first and spread <= 0.6 * first


@symptom(
    "reward hacking",
    "read completions of high reward, add a weighted reward for what they neglect, raise algorithm.beta",
)
def reward_hacking(history: RoundHistory, gate: gates.RewardHacking) -> str | None:
    """The reward rose while a monitor, or accuracy on held-out prompts, fell."""
    if len(history.rounds) < 2 * START:
        return None
    rise = history.rise("reward", "reward_std")
    if rise is None or rise < gate.effect:
        return None
    for name in gate.monitors if gate.monitors is not None else history.monitors:
        fall = history.rise(f"rewards/{name}/mean", f"rewards/{name}/std")
        if fall is not None and fall <= -gate.effect:
            first, latest = history.start(f"rewards/{name}/mean"), history.latest(f"rewards/{name}/mean")
            return f"the reward rose by {rise:.1f} standard deviations, {name} fell from {first:.3g} to {latest:.3g}"
    if lost := _accuracy_loss(history):
        return f"the reward rose by {rise:.1f} standard deviations, {lost}"
    return None


def _accuracy_loss(history: RoundHistory) -> str | None:
    """Evidence that the 95% interval of the latest held-out accuracy lies below that of the first, or None."""
    numbers = sorted(number for number in history.evaluations if number <= history.round)
    if len(numbers) < 2:
        return None
    first, latest = history.evaluations[numbers[0]], history.evaluations[numbers[-1]]
    if latest["ci95"][1] >= first["ci95"][0]:
        return None
    return f"held-out accuracy fell from {first['accuracy']:.1%} to {latest['accuracy']:.1%} (policy {numbers[-1]})"


@symptom(
    "length explosion",
    "raise algorithm.beta, penalize length (rewards.length:overlong_reward, algorithm.response_length), lower "
    "update.learning_rate",
)
def length_explosion(history: RoundHistory, gate: gates.LengthExplosion) -> str | None:
    """Completions got much longer, and are truncated or no better."""
    start, latest = history.start(LENGTH), history.latest(LENGTH)
    clipped = history.latest("completions/clipped_ratio")
    if start is None or latest is None or latest < gate.ratio * start:
        return None
    growth = f"completions have {latest:.0f} tokens, {start:.0f} in the first rounds"
    if clipped is not None and clipped >= gate.clipped:
        return f"{growth}; {clipped:.0%} are truncated"
    rise = history.rise("reward", "reward_std")
    return f"{growth}; the reward did not rise" if rise is not None and rise < 0.1 else None


@symptom(
    "empty outputs",
    "raise algorithm.beta, lower update.learning_rate, check whether a reward favours empty answers",
)
def empty_outputs(history: RoundHistory, gate: gates.EmptyOutputs) -> str | None:
    """Completions end at once."""
    start, latest = history.start(LENGTH), history.latest(LENGTH)
    if latest is not None and latest <= gate.min_length:
        return f"completions have {latest:.1f} tokens"
    if start is not None and latest is not None and latest <= gate.ratio * start:
        return f"completions have {latest:.1f} tokens, {start:.0f} in the first rounds"
    return None


@symptom(
    "cold start",
    "train on demonstrations first (warmstart.sft), use easier prompts or a reward with more steps, raise "
    "rollout.num_generations",
)
def cold_start(history: RoundHistory, gate: gates.ColdStart) -> str | None:
    """No round so far had enough groups to learn from."""
    zero = history.values(ZERO_STD)
    if len(zero) < gate.rounds or min(zero) < gate.zero_std:
        return None
    return f"in none of {len(zero)} rounds did more than {1 - min(zero):.0%} of the groups differ in reward"


@symptom(
    "sampler-trainer mismatch",
    "in float32, or with update.lora, the sampler had another policy: run this round again, since an update now proves "
    "its rollouts; in 16 bits it may be rounding: set algorithm.mismatch.correction: token_tis where a token is an "
    "action, else sequence_mean_mis with min and max near 1",
)
def sampler_mismatch(history: RoundHistory, gate: gates.SamplerMismatch) -> str | None:
    """Sampler and trainer disagree, measured per token because the gap of a whole completion grows with its length.

    A sampler that holds an older policy should disagree, so only rounds sampled from the latest one count.
    """
    if history.now("sampling/staleness"):
        return None
    gap, kl = history.now("sampling/sampling_logp_difference/mean"), history.now("sampling/kl")
    outside = history.now("sampling/outside_band")
    if gap is not None and gap > gate.logp_difference:
        return f"log-probs differ by {gap:.2g} nats per token on average"
    if kl is not None and kl > gate.kl:
        return f"the sampler's KL from the trainer is {kl:.2g} nats per token"
    if outside is not None and outside > gate.outside_band:
        return f"{outside:.1%} of the tokens are less than half or more than twice as likely for the trainer"
    return None


@symptom("stale rollouts", "lower rollout.lag, lower update.learning_rate, raise algorithm.beta")
def stale_rollouts(history: RoundHistory, gate: gates.StaleRollouts) -> str | None:
    """The weights for an older sampling policy are so unequal that few tokens count."""
    share, lag = history.now("sampling/token_effective_sample_size"), history.now("sampling/staleness")
    if not lag or share is None or share >= gate.effective_sample_size:
        return None
    return f"sampled {lag:g} rounds earlier, the tokens are worth {share:.0%} as many of the latest policy"


@symptom(
    "expert collapse",
    "lower update.learning_rate, raise algorithm.beta, or train a LoRA adapter, which leaves the router unchanged",
)
def expert_collapse(history: RoundHistory, gate: gates.ExpertCollapse) -> str | None:
    """A layer of a mixture of experts uses few of its experts, and used more of them before."""
    now, start = history.now("experts/entropy"), history.start("experts/entropy")
    if now is None or start is None or now >= gate.entropy * start:
        return None
    share = history.now("experts/largest_share")
    return f"the entropy over a layer's experts fell from {start:.2g} to {now:.2g}, and one expert gets {share:.0%}"


@symptom(
    "no movement",
    "raise update.learning_rate 3 to 10 times (LoRA needs about ten times that of full training), lower algorithm.beta",
)
def no_movement(history: RoundHistory, gate: gates.NoMovement) -> str | None:
    """There were groups to learn from, yet neither the policy nor its reward moved from the start."""
    over = history.round == history.planned and history.round in history.evaluations
    if len(history.rounds) < gate.rounds and not over:
        return None
    kl, change = _distance(history), _reward_change(history)
    trained = [metrics for metrics in history.rounds if metrics.get("trained_completions") != 0]
    zero = [value for metrics in trained if (value := metrics.get(ZERO_STD)) is not None]
    if not zero or statistics.fmean(zero) >= NOTHING_TO_LEARN or kl is None or change is None:
        return None
    if abs(kl) > gate.kl or abs(change) > gate.effect:
        return None
    gain = _accuracy_gain(history)
    accuracy = f", held-out accuracy by {100 * gain:+.1f} points" if gain is not None else ""
    moved = f"the reward moved by {change:+.2f} standard deviations{accuracy}"
    return f"after {history.round} rounds the KL from policy 0 is {kl:.1g} nats per token, and {moved}"


def _distance(history: RoundHistory) -> float | None:
    """KL of the policy from policy 0 in nats per token: from its evaluation, else from the latest rounds' metrics."""
    distance = (history.evaluations.get(history.round) or {}).get("distance")
    return float(distance["kl"]) if distance else history.latest("kl")


def _reward_change(history: RoundHistory) -> float | None:
    """Change of the reward since the start, in standard deviations of the first rounds' completions."""
    rewards, spread = history.values("reward"), history.values("reward_std")
    if len(rewards) > START:
        return history.rise("reward", "reward_std")
    return (rewards[-1] - rewards[0]) / spread[0] if rewards and spread and spread[0] else None


def _accuracy_gain(history: RoundHistory) -> float | None:
    """Held-out accuracy of this round's policy less that of policy 0."""
    first, latest = history.evaluations.get(0), history.evaluations.get(history.round)
    return None if first is None or latest is None else float(latest["accuracy"] - first["accuracy"])


@symptom(
    "unused tools",
    "name the tools in the prompt, demonstrate calls (warmstart.sft), set rollout.tool_parser for the model",
)
def unused_tools(history: RoundHistory, gate: gates.UnusedTools) -> str | None:
    """Completions of the latest rounds hardly call a tool, or one of several."""
    all_calls, count = history.latest("tools/call_frequency"), min(START, len(history.rounds))
    if all_calls is None:
        return None
    latest = f"{count} rounds" if count > 1 else "round"
    if all_calls <= gate.calls:
        return (
            f"completions of the latest {latest} call a tool {all_calls:.2g} times"
            if all_calls
            else f"no completion of the latest {latest} called a tool"
        )
    unused = [
        metric.split("/")[1]
        for metric in history.rounds[-1]
        if metric.startswith("tools/") and metric.endswith("/call_frequency") and (history.latest(metric) or 0) == 0
    ]
    return f"no completion of the latest {latest} called {' or '.join(unused)}" if unused else None


REGISTRY["memory"] = SymptomRule(
    "out of memory",
    "lower deepspeed.max_tokens_per_micro_batch or rollout.max_completion_length, set "
    "deepspeed.gradient_checkpointing: true or a higher deepspeed.zero_stage; `rloo plan` shows what fits",
    None,
)
