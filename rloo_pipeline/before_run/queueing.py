"""Estimates a run's wall-clock time, and the time that SLURM's queue adds for each way to run there.

A round is a chain of three jobs: rollout, then score (in parallel with reference and teacher), then update; shards run
in parallel. Reward functions with their own jobs run before the others. `rollout.refill` adds a job before the update,
and one for its reference log-probs. With `rollout.lag`, only part of this chain waits for the previous update. Prompts
and warm start precede the first round; evaluation, distance and report follow the last one. With a lag, the duration of
a round follows from the time of each side (docs/overlap.md).
"""

from collections.abc import Mapping
from typing import NamedTuple

from rloo_pipeline.before_run import estimate
from rloo_pipeline.config import Config
from rloo_pipeline.stages.table import ROWS

SUBMISSION = 20.0
"""Overhead of a SLURM job in seconds, besides its wait and work: submission and polling (docs/cluster.md)."""
ON_SNAKEMAKES_MACHINE = {row.stage for row in ROWS if row.local}
"""Stages that do not run as SLURM jobs."""
MUCH = 0.2
"""Share of the total time spent in the queue and in engine starts above which a single job is recommended."""


class Mode(NamedTuple):
    """One way to run on SLURM."""

    command: str
    jobs: int
    """Number of SLURM jobs of the run. The shards of a round form one array job."""
    waits: int
    """Number of consecutive waits in the queue."""
    queue: float
    """Seconds in the queue and between jobs."""
    gpus: int
    """Maximum number of GPUs held at once."""


def wall_seconds(config: Config, hours: Mapping[str, float]) -> dict[str, float]:
    """Wall-clock seconds of each stage, with all shards in parallel.

    Args:
        config: the run's configuration.
        hours: GPU-hours of each stage.
    """
    return {stage: 3600 * value / gpus_of(config)[stage] for stage, value in hours.items()}


def gpus_of(config: Config) -> dict[str, int]:
    """Number of GPUs that each stage of a round uses at once. Shards of the reference or the teacher run in turn if
    together they would need more GPUs than the samplers and the update.
    """
    shards, each = config.rollout.shards, config.deepspeed.forward_processes
    rollout, update = shards * config.sampler_gpus, config.deepspeed.processes
    at_once = next(
        count for count in range(shards, 0, -1) if not shards % count and count * each <= max(rollout, update)
    )
    return {"rollout": rollout, "reference": at_once * each, "teacher": at_once * each, "update": update}


def modes(config: Config, wait: float) -> tuple[Mode, Mode]:
    """The two ways to run: each stage as a job, or the whole run as one job.

    Args:
        config: the run's configuration.
        wait: seconds that a job waits in the queue.
    """
    counts = {stage: count for stage, count in estimate.jobs(config).items() if stage not in ON_SNAKEMAKES_MACHINE}
    waits = 2 + _waits_of_rounds(config) + 3
    gpus = gpus_of(config)
    at_once = gpus["update"] + max(gpus["rollout"], gpus["reference"]) if config.rollout.lag else max(gpus.values())
    jobs = sum(counts.values())
    return (
        Mode("snakemake --profile profiles/slurm", jobs, waits, waits * (wait + SUBMISSION), at_once),
        Mode("rloo submit", 1, 1, wait, at_once),
    )


def _waits_of_rounds(config: Config) -> int:
    """Number of consecutive waits of the rounds' jobs. An update waits for the previous one and for its rollouts, which
    a lag allows to begin earlier.
    """
    alone = any(reward.gpus for reward in config.rewards)
    refill = 1 + config.uses_reference if config.rollout.refill else 0
    until = [0]
    for round_ in range(1, config.rounds + 1):
        sampled = until[config.rollout.policy_of(round_)] + 2 + alone + refill
        until.append(max(until[-1], sampled) + 1)
    return until[-1]


def advice(config: Config, wait: float, work: tuple[float, float] | None) -> str:
    """Recommends a mode, with the reason, in one sentence.

    Args:
        config: the run's configuration.
        wait: seconds that a job waits in the queue.
        work: seconds that the stages take in each of `modes`, including engine starts; None if unknown.
    """
    stages, single_job = modes(config, wait)
    if work is None:
        return f"{single_job.command}, unless a stage takes much longer than {estimate.minutes(wait + SUBMISSION)}"
    cold, warm = work
    share = (stages.queue + cold - warm) / (stages.queue + cold)
    if share < MUCH:
        return (
            f"{stages.command}: queueing and starting engines take {share:.0%} of the time, but no GPU is held while "
            "it has nothing to do"
        )
    return (
        f"{single_job.command}: as separate jobs, stages would spend {share:.0%} of the time in the queue and starting "
        "engines"
    )


class SideSeconds(NamedTuple):
    """Wall-clock seconds of the two sides of a round."""

    sampling: float
    """Rollouts, scores and reference log-probs."""
    training: float
    """The update."""

    def round_seconds(self, lag: int) -> float:
        """Seconds per round in steady state. With a lag, the two sides work at the same time."""
        return max(self.sampling, self.training) if lag else self.sampling + self.training


def side_seconds(config: Config, hours: Mapping[str, float]) -> SideSeconds:
    """Seconds of each side of a round, from estimated GPU-hours over all rounds, with all shards in parallel."""
    seconds = {stage: value / config.rounds for stage, value in wall_seconds(config, hours).items()}
    scored = max(seconds.get("reference", 0.0), seconds.get("teacher", 0.0))
    return SideSeconds(seconds["rollout"] + scored, seconds["update"])
