"""Symptoms of a failing run: one function per symptom, which returns its evidence as text, or None.

Each function judges a run up to some round. Its keyword arguments are its limits, and keys of the section of `gates`
with its name. Most compare the latest rounds with the run's start, the median of its first three rounds. A metric that
does not exist in a round (null) is never evidence.
"""

import statistics
from typing import Annotated

from pydantic import Field

from rloo_pipeline.checks.history import START, RoundHistory
from rloo_pipeline.checks.registry import SYMPTOMS, SymptomRule, symptom
from rloo_pipeline.errors import counted

JUMPS, SPAN = 2, 5
"""Number of jumps of the gradient norm within `SPAN` rounds that counts as instability; a single one is a bad batch."""
MANY_EQUAL = 0.5
"""Share of groups with identical rewards at which a low entropy counts as a collapse."""
NOTHING_TO_LEARN = 0.9
"""Share of groups with identical rewards at which no learning rate would move the policy."""
LENGTH, ZERO_STD = "completions/mean_length", "frac_reward_zero_std"

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
OverOne = Annotated[float, Field(gt=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


@symptom("unstable", "raise rollout.num_generations to 6 or 8, lower update.learning_rate, raise algorithm.beta")
def unstable(history: RoundHistory, *, ratio: OverOne = 5.0) -> str | None:
    """The gradient norm jumps repeatedly.

    Limits:
        ratio: a gradient norm at least this many times the median of earlier rounds is a jump. Two jumps within five
            rounds are the symptom. If norms are log-normal, with a standard deviation of their
            logarithm of 0.9, chance shows it in 40% of runs of 100 rounds; with 0.7 in 10%, with 0.5 in none.
    """
    norms = history.values("grad_norm")
    places = range(max(START, len(norms) - SPAN), len(norms))
    jumps = [norms[place] / usual for place in places if (usual := statistics.median(norms[:place])) > 0]
    large = [jump for jump in jumps if jump >= ratio]
    if len(large) < JUMPS:
        return None
    return f"{len(large)} of the last {len(jumps)} gradient norms are up to {max(large):.0f} times the usual one"


@symptom("KL explosion", "raise algorithm.beta to 0.1, lower update.learning_rate")
def kl_explosion(history: RoundHistory, *, max_kl: Positive = 0.5, growth: OverOne = 4.0) -> str | None:
    """The policy moves too far from the reference policy, or moves away fast.

    Limits:
        max_kl: maximum mean KL per token, in nats.
        growth: or: maximum growth of the KL over three rounds, as a factor, once the KL exceeds half of `max_kl`.
    """
    kl, values = history.now("kl"), history.values("kl")
    if kl is None:
        return None
    if kl > max_kl:
        return f"KL {kl:.3g} nats per token, over {max_kl:g}"
    before = values[-1 - START] if len(values) > START else None
    if before and kl > max_kl / 2 and kl > growth * before > 0:
        return f"KL {kl:.3g} nats per token, {kl / before:.1f} times the value {START} rounds earlier"
    return None


@symptom(
    "reward collapse",
    "raise rollout.temperature, use more diverse prompts or a reward with more steps; resume from an earlier policy",
)
def reward_collapse(history: RoundHistory, *, zero_std: UpToOne = 0.8, entropy: Fraction = 0.1) -> str | None:
    """The completions of most prompts get identical rewards although the prompts are not solved.

    Limits:
        zero_std: fraction of groups without differences in reward, averaged over three rounds, from which this is a
            symptom. With few prompts a round, chance alone reaches 0.8 within 100 rounds: with 8 prompts in 7% of runs
            whose true fraction is 0.5 and in 70% if it is 0.6, with 16 in 12% if it is 0.6, with 64 in 8% if it is 0.7.
        entropy: or: half of the groups are without differences and the entropy is below this fraction of its value in
            the first rounds.
    """
    zero, latest, first = history.latest(ZERO_STD), history.latest("entropy"), history.start("entropy")
    if zero is None or len(history.rounds) <= START or _solved(history):
        return None
    if zero >= zero_std and min(history.values(ZERO_STD)) < zero_std:
        return f"{zero:.0%} of the groups have identical rewards"
    if zero >= MANY_EQUAL and latest is not None and first and latest < entropy * first:
        drop = f"entropy fell from {first:.2g} to {latest:.2g} nats per token"
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
def reward_hacking(history: RoundHistory, *, effect: Positive = 0.2, monitors: list[str] | None = None) -> str | None:
    """The reward rises while a monitor, or accuracy on held-out prompts, falls.

    Limits:
        effect: rise of the reward, and fall of a monitor, from which this is a symptom; in standard deviations over the
            completions of the first rounds. Both must also exceed four standard errors of the noise between rounds.
        monitors: names of rewards that should not fall. Default: those of weight 0.
    """
    if len(history.rounds) < 2 * START:
        return None
    rise = history.rise("reward", "reward_std")
    if rise is None or rise < effect or history.is_noise("reward"):
        return None
    rose = f"the reward rose by {rise:.1f} standard deviations, but "
    for name in monitors if monitors is not None else history.monitors:
        fall = history.rise(f"rewards/{name}/mean", f"rewards/{name}/std")
        if fall is not None and fall <= -effect and not history.is_noise(f"rewards/{name}/mean"):
            first, latest = history.start(f"rewards/{name}/mean"), history.latest(f"rewards/{name}/mean")
            return f"{rose}{name} fell from {first:.3g} to {latest:.3g}"
    if lost := _accuracy_loss(history):
        return rose + lost
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
def length_explosion(history: RoundHistory, *, ratio: OverOne = 2.0, clipped: UpToOne = 0.2) -> str | None:
    """Completions get much longer, and are truncated or no better.

    Limits:
        ratio: mean length from which this is a symptom, as a multiple of the first rounds' mean.
        clipped: fraction of truncated completions from which this is a symptom even if the reward rises.
    """
    start, latest = history.start(LENGTH), history.latest(LENGTH)
    cut = history.latest("completions/clipped_ratio")
    if start is None or latest is None or latest < ratio * start:
        return None
    growth = f"completions have {latest:.0f} tokens, {start:.0f} in the first rounds"
    if cut is not None and cut >= clipped:
        return f"{growth}; {cut:.0%} are truncated"
    rise = history.rise("reward", "reward_std")
    return f"{growth}; the reward did not rise" if rise is not None and rise < 0.1 else None


@symptom(
    "empty outputs", "raise algorithm.beta, lower update.learning_rate, check whether a reward favours empty answers"
)
def empty_outputs(history: RoundHistory, *, ratio: Fraction = 0.1, min_length: NotNegative = 2.0) -> str | None:
    """Completions become empty or nearly so.

    Limits:
        ratio: mean length up to which this is a symptom, as a fraction of the first rounds' mean.
        min_length: mean length in tokens, with the end token, up to which this is a symptom in any case.
    """
    start, latest = history.start(LENGTH), history.latest(LENGTH)
    if latest is not None and latest <= min_length:
        return f"completions have {latest:.1f} tokens"
    if start is not None and latest is not None and latest <= ratio * start:
        return f"completions have {latest:.1f} tokens, {start:.0f} in the first rounds"
    return None


@symptom(
    "cold start",
    "train on demonstrations first (warmstart.sft), use easier prompts or a reward with more steps, raise "
    "rollout.num_generations; where completions do not end, raise rollout.max_completion_length or token_budget",
)
def cold_start(history: RoundHistory, *, rounds: Count = 3, zero_std: UpToOne = 0.9) -> str | None:
    """No round so far had enough groups to learn from, or trained on a completion.

    Limits:
        rounds: number of rounds without signal from which this is a symptom. A shorter run is judged after its last
            round.
        zero_std: a round has no signal if at least this fraction of its groups is without differences in reward.
    """
    zero = history.values(ZERO_STD)
    if len(zero) < rounds and history.round != history.planned:
        return None
    of_rounds = f"each of {len(zero)} rounds" if len(zero) > 1 else f"round {history.round}"
    if zero and min(zero) >= zero_std:
        return f"in {of_rounds}, at most {1 - min(zero):.0%} of the groups had different rewards"
    if not any(history.values("trained_completions") or [1]):
        return f"no update up to round {history.round} trained on a completion"
    return None


@symptom(
    "sampler-trainer mismatch",
    "in float32, or with update.lora, the sampler had the wrong policy: run this round again, and the update checks "
    "its rollouts; in 16 bits it may be rounding: set algorithm.mismatch.correction: token_tis if a token is an "
    "action, else sequence_mean_mis with min and max near 1",
)
def sampler_mismatch(
    history: RoundHistory, *, logp_difference: Positive = 0.1, kl: Positive = 0.01, outside_band: Fraction = 0.02
) -> str | None:
    """Sampler (vLLM) and trainer give the same tokens different log-probs.

    A sampler that holds an older policy should disagree, so only rounds sampled from the latest one count.

    Limits:
        logp_difference: maximum mean absolute difference per token, in nats. Rounding in bfloat16 alone causes 0.01 to
            0.04.
        kl: or: maximum KL between sampler and trainer per token, in nats (k3). Rounding in bfloat16 alone causes 0.0001
            to 0.002.
        outside_band: or: maximum fraction of tokens whose importance weight is below 0.5 or above 2.
    """
    if history.now("sampling/staleness"):
        return None
    gap, divergence = history.now("sampling/sampling_logp_difference/mean"), history.now("sampling/kl")
    outside = history.now("sampling/outside_band")
    if gap is not None and gap > logp_difference:
        return f"log-probs differ by {gap:.2g} nats per token on average"
    if divergence is not None and divergence > kl:
        return f"the sampler's KL from the trainer is {divergence:.2g} nats per token"
    if outside is not None and outside > outside_band:
        return f"{outside:.1%} of the tokens are less than half or more than twice as likely for the trainer"
    return None


@symptom(
    "stale rollouts",
    "lower rollout.lag or raise rollout.token_budget, lower update.learning_rate, raise algorithm.beta",
)
def stale_rollouts(history: RoundHistory, *, effective_sample_size: Fraction = 0.5) -> str | None:
    """The policy has moved so far from older ones that sampled (`rollout.lag`, `rollout.token_budget`) that few tokens
    count.

    Limits:
        effective_sample_size: minimum effective sample size of the tokens' importance weights, as a share of the tokens
            (Kong 1992).
    """
    share, lag = history.now("sampling/token_effective_sample_size"), history.now("sampling/staleness")
    if not lag or share is None or share >= effective_sample_size:
        return None
    rounds = f"{lag:.2g}"
    age = "one round" if rounds == "1" else f"{rounds} rounds"
    return f"tokens sampled {age} earlier are worth only {share:.0%} as many from the latest policy"


@symptom(
    "expert collapse",
    "lower update.learning_rate, raise algorithm.beta, or train a LoRA adapter, which leaves the router unchanged",
)
def expert_collapse(history: RoundHistory, *, entropy: Fraction = 0.5) -> str | None:
    """A layer of a mixture of experts uses few of its experts, and used more of them before.

    Limits:
        entropy: minimum entropy of the worst layer, as a fraction of its value in the first rounds.
    """
    now, start = history.now("experts/entropy"), history.start("experts/entropy")
    if now is None or start is None or now >= entropy * start:
        return None
    share = history.now("experts/largest_share")
    return f"the entropy over a layer's experts fell from {start:.2g} to {now:.2g}, and one expert gets {share:.0%}"


@symptom(
    "no movement",
    "raise update.learning_rate 3 to 10 times (LoRA needs about ten times that of full training), lower algorithm.beta",
)
def no_movement(
    history: RoundHistory, *, rounds: Count = 10, kl: Positive = 2e-4, effect: Positive = 0.1
) -> str | None:
    """There were groups to learn from, yet neither the policy nor its reward moved from the start.

    Limits:
        rounds: number of rounds after which this can be a symptom. A shorter run is judged after its last round.
        kl: KL from policy 0 per token, in nats, up to which the policy counts as unmoved. With `algorithm.beta: 0` it
            is only computed for evaluated policies.
        effect: change of the reward up to which it counts as unmoved, in standard deviations over the completions of
            the first rounds.
    """
    over = history.round == history.planned and history.round in history.evaluations
    if len(history.rounds) < rounds and not over:
        return None
    moved, change = _distance(history), _reward_change(history)
    trained = [metrics for metrics in history.rounds if metrics.get("trained_completions") != 0]
    zero = [value for metrics in trained if (value := metrics.get(ZERO_STD)) is not None]
    if not zero or statistics.fmean(zero) >= NOTHING_TO_LEARN or moved is None or change is None:
        return None
    if abs(moved) > kl or abs(change) > effect:
        return None
    gain = _accuracy_gain(history)
    accuracy = f", held-out accuracy by {100 * gain:+.1f} points" if gain is not None else ""
    reward = f"the reward moved by {change:+.2f} standard deviations{accuracy}"
    return f"after {counted(history.round, 'round')} the KL from policy 0 is {moved:.1g} nats per token, and {reward}"


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
def unused_tools(history: RoundHistory, *, calls: NotNegative = 0.0) -> str | None:
    """The model hardly calls its tools, or never calls one of them.

    Limits:
        calls: calls of a completion, averaged over three rounds, up to which this is a symptom.
    """
    mean, count = history.latest("tools/call_frequency"), min(START, len(history.rounds))
    if mean is None:
        return None
    latest = f"{count} rounds" if count > 1 else "round"
    if mean <= calls:
        return (
            f"completions of the latest {latest} call a tool {mean:.2g} times"
            if mean
            else f"no completion of the latest {latest} called a tool"
        )
    unused = [
        metric.split("/")[1]
        for metric in history.rounds[-1]
        if metric.startswith("tools/") and metric.endswith("/call_frequency") and (history.latest(metric) or 0) == 0
    ]
    return f"no completion of the latest {latest} called {' or '.join(unused)}" if unused else None


SYMPTOMS["memory"] = SymptomRule(
    "out of memory",
    "lower deepspeed.max_tokens_per_micro_batch or rollout.max_completion_length, set "
    "deepspeed.gradient_checkpointing: true or a higher deepspeed.zero_stage; `rloo plan` shows what fits",
    None,
    "A stage ran out of memory, according to its log. The stage has failed, so this gate has no `stop`.",
)
