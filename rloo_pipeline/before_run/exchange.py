"""Time and bandwidth to pass a round's policy from the trainer to the samplers, as files on the shared file system."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import estimate, layouts, memory, speeds
from rloo_pipeline.config import Config

SHARE = 0.1
"""Largest share of a round that should be spent waiting for the file system."""


class Exchange(NamedTuple):
    """Estimated exchange of one policy."""

    policy: float
    """Bytes of the policy's weights."""
    nodes: int
    """Smallest number of nodes that sample."""
    written: float
    """Seconds for the ranks of an update to write and digest it, without waiting for the file system."""
    read: float
    """Seconds for a node to digest it and its engines to load it, without waiting for the file system."""

    def bandwidth(self, round_seconds: float) -> float:
        """Bytes per second that the file system must give to all nodes together, so that waits take `SHARE` of a round.
        A policy is written once, and read once by the update and by each node that samples.
        """
        return self.policy * (2 + self.nodes) / (SHARE * round_seconds)


def reckoned(config: Config, shape: ModelDims) -> Exchange:
    """Estimates the exchange of a policy between the update and the rollouts of a run."""
    policy = estimate.policy_bytes(config, shape)
    writers = config.deepspeed.processes if config.update.lora is None else 1
    nodes = -(-config.rollout.shards * estimate.sampler_gpus(config) // layouts.PER_NODE)
    digested = policy / (speeds.DIGESTING.typical * manifest.READERS)
    loaded = policy / (speeds.LOADING.typical * config.vllm.tensor_parallel_size)
    return Exchange(policy, nodes, policy / (speeds.WRITING.typical * writers), digested + loaded)


def lines(config: Config, shape: ModelDims, round_seconds: float) -> Iterator[str]:
    """Lines of the plan; none for a policy of less than a GB."""
    found = reckoned(config, shape)
    if found.policy >= memory.GB:
        yield (
            f"policy of a round: {found.policy / memory.GB:,.1f} GB; writing takes about {found.written:,.1f} s and "
            f"reading {found.read:,.1f} s (estimated from the speed of one CPU core),"
        )
        yield (
            f"  plus waits for the file system: {SHARE:.0%} of a round if it gives "
            f"{found.bandwidth(round_seconds) / memory.GB:,.1f} GB/s to all nodes together"
        )
