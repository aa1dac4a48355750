"""What there is to draw of a run, round by round, and of several runs side by side; figures.py draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rloo_pipeline.config import Reward


class Line(NamedTuple):
    """One metric of metrics.json as a curve."""

    metric: str
    label: str


class Chart(NamedTuple):
    """Curves that share an axis."""

    title: str
    caption: str
    lines: tuple[Line, ...]
    """Of one run, all of them; of several runs, the first of each."""
    band: tuple[str, str] | None = None
    """Metrics that bound the shaded ground: (lower, upper), or (middle, half its width) with `spread`."""
    spread: bool = False
    tickformat: str = ""
    from_zero: bool = True
    """Whether the axis begins at 0."""
    log: bool = False
    """Whether the axis is logarithmic."""
    only_changing: bool = False
    """Left out where the values never change."""


LENGTH = Chart(
    "Completion length",
    "Mean number of tokens. Shaded: shortest to longest.",
    (
        Line("completions/mean_length", "all"),
        Line("completions/mean_terminated_length", "ended by themselves"),
    ),
    ("completions/min_length", "completions/max_length"),
)
KL = Chart(
    "KL from the warm start",
    "Distance of the sampling policy from policy 0: nats a completion, k1 estimate.",
    (Line("kl/sequence_mean", "KL"),),
)
ENTROPY = Chart(
    "Entropy",
    "How undecided the policy is: mean nats a token. A fall to 0 is a collapse.",
    (Line("entropy", "entropy"),),
)
GRADIENT = Chart(
    "Gradient norm",
    "Before clipping, mean over the round’s optimizer steps.",
    (Line("grad_norm", "gradient norm"),),
)


def charts(rewards: Sequence[Reward]) -> list[Chart]:
    """Everything there is to draw of a run with these rewards."""
    functions = tuple(Line(f"rewards/{r.column}/mean", f"{r.column}, weight {r.weight:g}") for r in rewards)
    wasted = (
        Line("completions/clipped_ratio", "truncated completions"),
        Line("frac_reward_zero_std", "prompts of equal rewards"),
    )
    clipped = (Line("clip_ratio/low_mean", "below the range"), Line("clip_ratio/high_mean", "above the range"))
    apart = (
        Line("sampling/sampling_logp_difference/mean", "mean"),
        Line("sampling/sampling_logp_difference/max", "largest"),
    )
    return [
        Chart(
            "Reward",
            "Weighted sum of the rewards, before the KL penalty: mean over the round’s completions. "
            "Shaded: one standard deviation of the round’s completions to either side.",
            (Line("reward", "reward"),),
            ("reward", "reward_std"),
            spread=True,
        ),
        Chart("Reward functions", "Mean of each function; one of weight 0 is watched and teaches nothing.", functions),
        LENGTH,
        Chart(
            "Samples that teach little",
            "Share of completions cut off at the length limit, and of prompts whose rewards are all the same.",
            wasted,
            tickformat=".0%",
        ),
        KL,
        Chart(
            "KL coefficient",
            "beta, steered from round to round towards the KL that was asked for.",
            (Line("beta", "beta"),),
            only_changing=True,
        ),
        ENTROPY,
        Chart(
            "Clipped ratios",
            "Share of completions (of tokens, at token level) from which the clip took the gradient.",
            clipped,
            tickformat=".1%",
        ),
        Chart(
            "Sampler against trainer",
            "How far the log-probs of vLLM and of the trainer are apart for the same token, in nats.",
            apart,
            log=True,
        ),
        GRADIENT,
        Chart("Learning rate", "At the round’s last optimizer step.", (Line("learning_rate", "learning rate"),)),
    ]


REWARD = Chart(
    "Reward by round",
    "Weighted sum of the rewards, before the KL penalty: mean over the round’s completions.",
    (Line("reward", "reward"),),
    from_zero=False,
)


def shared_charts(functions: Sequence[str]) -> list[Chart]:
    """What is drawn of several runs beside their reward.

    Args:
        functions: names of the reward functions that decide what is right in any of the runs.
    """
    deciding = [
        Chart(
            f"Reward function {name}",
            "Its mean over the round’s completions; it decides what counts as right.",
            (Line(f"rewards/{name}/mean", name),),
            from_zero=False,
        )
        for name in functions
    ]
    clipped = Chart(
        "Clipped ratios",
        "Share of what each run takes for an action, completions or tokens, from which the clip took the gradient.",
        (Line("clip_ratio/region_mean", "clipped"),),
        tickformat=".1%",
    )
    return [*deciding, ENTROPY, LENGTH._replace(caption="Mean number of tokens.", band=None), KL, GRADIENT, clipped]
