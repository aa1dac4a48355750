"""Estimates the duration of a round with `rollout.lag` from the time of each side (docs/overlap.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rloo_pipeline.before_run import estimate, queueing
from rloo_pipeline.config import Config


class SideSeconds(NamedTuple):
    """Wall seconds of the two sides of a round."""

    sampling: float
    """Rollouts, scores and reference log-probs."""
    training: float
    """The update."""

    def round_seconds(self, lag: int) -> float:
        """Seconds of a round, once the first ones are through: an update waits for rollouts that its lag + 1 allows."""
        both = self.sampling + self.training
        return max(self.sampling, self.training, both / (lag + 1)) if lag else both


def estimated(config: Config, hours: Mapping[str, float]) -> SideSeconds:
    """Seconds per side of a round from estimated GPU-hours over all rounds, with all shards side by side."""
    seconds = {stage: value / config.rounds for stage, value in queueing.wall_seconds(config, hours).items()}
    scored = max(seconds.get("reference", 0.0), seconds.get("teacher", 0.0))
    return SideSeconds(seconds["rollout"] + scored, seconds["update"])


def lines(config: Config, sides: SideSeconds, source: str, unit: str) -> Iterator[str]:
    """Lines of the plan about the gain of a lag.

    Args:
        config: the run's configuration.
        sides: seconds of a round.
        source: where they come from.
        unit: `GPU` or `core`.
    """
    lag = config.rollout.lag or 1
    alone, beside = sides.round_seconds(0), sides.round_seconds(lag)
    of_gpus = (config.rollout.shards * estimate.sampler_gpus(config), config.deepspeed.processes)
    of_cores = (config.vllm.job_threads, config.deepspeed.threads * config.deepspeed.processes)
    sampler, trainer = of_gpus if unit == "GPU" else of_cores
    key = f"rollout.lag: {lag}" + ("" if config.rollout.lag else " (not set)")
    units = unit if sampler == 1 else f"{unit}s"
    yield f"{key}: {sampler} {units} to sample beside {trainer} to train, {sampler + trainer} at once"
    yield (
        f"  {source}: {sides.sampling:,.1f} s to sample and {sides.training:,.1f} s to train a round: {beside:,.1f} s "
        f"instead of {alone:,.1f} s, {alone / beside:.2f} times as fast"
    )
