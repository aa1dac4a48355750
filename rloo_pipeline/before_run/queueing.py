"""Wall-clock time of a run, and what SLURM's queue adds in each of the ways to run there.

A round is a chain of three jobs: rollout, then score (reference and teacher beside it), then update; shards run side by
side. Reward functions with jobs of their own run before the other ones.
With `rollout.refill` there is one more before the update, and one for its reference log-probs. With `rollout.lag`, only
part of this chain is behind the update before.
Before the first round come prompts and warm start, after the last one evaluation, distance and report.
The duration of a round with a lag follows from the time of each side (docs/overlap.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rloo_pipeline.before_run import estimate
from rloo_pipeline.config import Config
from rloo_pipeline.stages.table import ROWS

SUBMISSION = 20.0
"""Seconds that a stage as a SLURM job takes besides its wait and its work (docs/cluster.md): submission, polling."""
ON_SNAKEMAKES_MACHINE = {row.stage for row in ROWS if row.local}
"""Stages that are not SLURM jobs."""
MUCH = 0.2
"""Share of the whole time from which the queue and starts of engines are a reason for one job."""


class Mode(NamedTuple):
    """One way to run on SLURM."""

    command: str
    jobs: int
    """SLURM jobs of the run; the shards of a round are one array job of that many tasks."""
    waits: int
    """Waits in the queue, one after the other."""
    queue: float
    """Seconds in the queue and between jobs."""
    gpus: int
    """GPUs held at once, at most."""


def wall_seconds(config: Config, hours: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage one after the other, with all shards side by side.

    Args:
        config: the run's configuration.
        hours: GPU-hours of each stage.
    """
    return {stage: 3600 * value / gpus_of(config)[stage] for stage, value in hours.items()}


def gpus_of(config: Config) -> dict[str, int]:
    """GPUs that a stage of a round uses at once. Shards of the reference, or of the teacher, wait for each other where
    together they would need more GPUs than the samplers and the update do.
    """
    shards, each = config.rollout.shards, config.deepspeed.forward_processes
    rollout, update = shards * config.sampler_gpus, config.deepspeed.processes
    at_once = next(
        count for count in range(shards, 0, -1) if not shards % count and count * each <= max(rollout, update)
    )
    return {"rollout": rollout, "reference": at_once * each, "teacher": at_once * each, "update": update}


def modes(config: Config, wait: float) -> tuple[Mode, Mode]:
    """Each stage as a job, and the whole run as one job.

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
    """Jobs of the rounds that wait one after the other: an update waits for the one before, and for its rollouts, which
    a lag lets begin earlier.
    """
    alone = any(reward.gpus for reward in config.rewards)
    refill = 1 + config.uses_reference if config.rollout.refill else 0
    until = [0]
    for round_ in range(1, config.rounds + 1):
        sampled = until[config.rollout.policy_of(round_)] + 2 + alone + refill
        until.append(max(until[-1], sampled) + 1)
    return until[-1]


def advice(config: Config, wait: float, work: tuple[float, float] | None) -> str:
    """The mode to take, and why, in one sentence.

    Args:
        config: the run's configuration.
        wait: seconds that a job waits in the queue.
        work: seconds that the stages take in each of `modes`, with the starts of engines; None if not known.
    """
    stages, single_job = modes(config, wait)
    if work is None:
        return f"{single_job.command}, unless a stage takes much longer than {estimate.minutes(wait + SUBMISSION)}"
    cold, warm = work
    share = (stages.queue + cold - warm) / (stages.queue + cold)
    if share < MUCH:
        return (
            f"{stages.command}: the queue and starts of engines are {share:.0%} of the time, and no GPU is held while "
            "it has nothing to do"
        )
    return (
        f"{single_job.command}: as jobs of their own, stages would wait in the queue and start engines for {share:.0%} "
        "of the time"
    )


class SideSeconds(NamedTuple):
    """Wall seconds of the two sides of a round."""

    sampling: float
    """Rollouts, scores and reference log-probs."""
    training: float
    """The update."""

    def round_seconds(self, lag: int) -> float:
        """Seconds of a round in steady state: with a lag, the two sides work at the same time."""
        return max(self.sampling, self.training) if lag else self.sampling + self.training


def side_seconds(config: Config, hours: Mapping[str, float]) -> SideSeconds:
    """Seconds per side of a round from estimated GPU-hours over all rounds, with all shards side by side."""
    seconds = {stage: value / config.rounds for stage, value in wall_seconds(config, hours).items()}
    scored = max(seconds.get("reference", 0.0), seconds.get("teacher", 0.0))
    return SideSeconds(seconds["rollout"] + scored, seconds["update"])
