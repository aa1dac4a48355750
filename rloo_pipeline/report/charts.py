"""Defines the charts of one run's metrics and of several runs' metrics; figures.py draws them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rloo_pipeline.config import Config


class Chart(NamedTuple):
    """Curves that share an axis."""

    title: str
    caption: str
    lines: Mapping[str, str]
    """Metric in metrics.json → label. One run's chart has all of them, a chart of several runs only the first."""
    band: tuple[str, str] | None = None
    """Metrics that bound the shaded area: (lower, upper), or (middle, half width) with `spread`."""
    band_of: int = 0
    """Index of the line whose colour the shaded area takes."""
    spread: bool = False
    tickformat: str = ""
    from_zero: bool = True
    """True if the y-axis starts at 0."""
    log: bool = False
    """True if the y-axis is logarithmic. Values of 0 and below are then not drawn."""
    only_changing: bool = False
    """True if the chart is left out when its values never change."""
    height: int = 230
    """Height in pixels, without a legend."""

    @property
    def first_metric(self) -> str:
        """The metric that is drawn for several runs."""
        return next(iter(self.lines))


LENGTH = Chart(
    "Completion length",
    "Mean number of tokens. Shaded: shortest to longest.",
    {"completions/mean_length": "all", "completions/mean_terminated_length": "not truncated"},
    ("completions/min_length", "completions/max_length"),
)
WASTED = Chart(
    "Samples that teach little",
    "Share of completions truncated at the length limit, and of prompts whose rewards are all equal.",
    {"completions/clipped_ratio": "truncated completions", "frac_reward_zero_std": "prompts with equal rewards"},
    tickformat=".0%",
)
TOOLS = Chart(
    "Calls of tools",
    "Mean number of calls of a completion, and the share of calls that an error answered.",
    {"tools/call_frequency": "calls of a completion", "tools/failure_frequency": "failed calls"},
)
TOKENS_FOR_TEACHING = Chart(
    "Tokens for a group that teaches",
    "Completion tokens of the round, divided by the groups that the update trains on whose rewards differ.",
    {"groups/tokens_per_teaching": "tokens"},
)
KL = Chart(
    "KL from the warm start",
    "Distance of the sampling policy from policy 0 (with the KL in the loss, of the policy in training): nats per "
    "completion, by each run’s estimator.",
    {"kl/sequence_mean": "KL"},
)
TEACHER = Chart(
    "Reverse KL to the teacher",
    "Mean of log π − log π of the teacher over the sampled tokens before the update, or the divergence in the loss "
    "(algorithm.teacher.top_k), in nats per token.",
    {"teacher/kl": "KL"},
)
BETA = Chart(
    "KL coefficient", "beta, adapted after each round towards the target KL.", {"beta": "beta"}, only_changing=True
)
ENTROPY = Chart(
    "Entropy", "How undecided the policy is: mean nats per token. A fall to 0 is a collapse.", {"entropy": "entropy"}
)
CLIPPED = Chart(
    "Clipped ratios",
    "Share of completions (of tokens, at token level) whose gradient was removed by the clip or, with cispo, whose "
    "weight was cut.",
    {"clip_ratio/low_mean": "below the range", "clip_ratio/high_mean": "above the range"},
    tickformat=".1%",
)
MISMATCH = Chart(
    "Sampler against trainer",
    "Difference between the log-probs of vLLM and of the trainer for the same token, in nats.",
    {"sampling/sampling_logp_difference/mean": "mean", "sampling/sampling_logp_difference/max": "largest"},
    log=True,
)
GRADIENT = Chart(
    "Gradient norm", "Before clipping, mean over the round’s optimizer steps.", {"grad_norm": "gradient norm"}
)
LEARNING_RATE = Chart("Learning rate", "At the round’s last optimizer step.", {"learning_rate": "learning rate"})
HEIGHT_OF_FIRST = 380
"""Height of the first chart of a page of several runs."""
MEAN_REWARD = "Weighted sum of the rewards, before the KL penalty: mean over the round’s completions."
REWARD = Chart(
    "Reward",
    f"{MEAN_REWARD} Shaded: one standard deviation of the round’s completions to either side.",
    {"reward": "reward"},
    ("reward", "reward_std"),
    spread=True,
)
REWARD_OF_RUNS = Chart("Reward by round", MEAN_REWARD, {"reward": "reward"}, from_zero=False)


def charts(config: Config) -> list[Chart]:
    """The charts of a run."""
    functions = Chart(
        "Reward functions",
        "Mean of each function; a function of weight 0 is only monitored.",
        {f"rewards/{r.column}/mean": f"{r.column}, weight {r.weight:g}" for r in config.rewards},
    )
    actions = "tokens" if config.algorithm.importance_sampling_level == "token" else "completions"
    effect = "weight was cut" if config.algorithm.clip == "cispo" else "gradient was removed"
    kl = config.algorithm.kl
    in_loss, older = kl.placement == "loss", config.rollout.lag or config.rollout.token_budget
    measured = f"Distance of the {'policy in training' if in_loss else 'sampling policy'} from policy 0"
    if older and kl.estimator == "k1" and (in_loss or config.algorithm.old_logps == "trainer"):
        measured = "KL from policy 0 of the latest policy on samples of older ones, which can be below 0"
    return [
        REWARD,
        functions,
        LENGTH,
        WASTED,
        TOOLS,
        TOKENS_FOR_TEACHING,
        KL._replace(caption=f"{measured}: nats per completion, {kl.estimator} estimate."),
        TEACHER,
        BETA,
        ENTROPY,
        CLIPPED._replace(caption=f"Share of {actions} whose {effect} by the clip."),
        MISMATCH,
        GRADIENT,
        LEARNING_RATE,
    ]


def shared_charts(functions: Sequence[str]) -> list[Chart]:
    """The charts of several runs.

    Args:
        functions: names of the reward functions that decide what is right in one of the runs.
    """
    deciding = [
        Chart(
            f"Reward function {name}",
            "Mean over the round’s completions; this function decides what counts as right.",
            {f"rewards/{name}/mean": name},
        )
        for name in functions
    ]
    length = LENGTH._replace(caption="Mean number of tokens.", band=None)
    clipped = CLIPPED._replace(lines={"clip_ratio/region_mean": "clipped"})
    return [REWARD_OF_RUNS._replace(height=HEIGHT_OF_FIRST), *deciding, ENTROPY, length, KL, GRADIENT, clipped]
