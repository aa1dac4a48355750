"""Estimates time, bandwidth and space for passing a round's policy from the trainer to the samplers, as files on the
shared file system or on the nodes' own disks (`exchange`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import layouts, memory, speeds
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices

SHARE = 0.1
"""Maximum share of a round that should be spent waiting for the file system."""


class Exchange(NamedTuple):
    """Estimated exchange of one policy."""

    policy: float
    """Bytes of the policy's weights."""
    nodes: int
    """Minimum number of nodes that sample."""
    written: float
    """Seconds for the ranks of an update to write and digest it, without waiting for the file system."""
    read: float
    """Seconds for a node to digest it and its engines to load it, without waiting for the file system."""

    def bandwidth(self, round_seconds: float) -> float:
        """Bytes per second that the file system must deliver to all nodes together for waits to take `SHARE` of a
        round. A policy is written once, and read once by the update and by each sampling node.
        """
        return self.policy * (2 + self.nodes) / (SHARE * round_seconds)


def reckoned(config: Config, shape: ModelDims) -> Exchange:
    """Estimates the exchange of a policy between the update and the rollouts of a run."""
    policy = memory.RunMemory(config, shape).policy
    writers = config.deepspeed.processes if config.update.lora is None else 1
    nodes = -(-config.rollout.shards * config.sampler_gpus // layouts.PER_NODE)
    digested = policy / (speeds.DIGESTING.typical * manifest.READERS)
    loaded = policy / (speeds.LOADING.typical * config.vllm.tensor_parallel_size)
    return Exchange(policy, nodes, policy / (speeds.WRITING.typical * writers), digested + loaded)


def lines(config: Config, shape: ModelDims, round_seconds: float) -> Iterator[str]:
    """Yields lines for the plan; none for a policy of less than 1 GB."""
    found = reckoned(config, shape)
    if found.policy >= memory.GB:
        yield (
            f"policy of a round: {found.policy / memory.GB:,.1f} GB; writing takes about {found.written:,.1f} s and "
            f"reading {found.read:,.1f} s (estimated from the speed of one CPU core),"
        )
        which = "" if config.node_folder is None else ", in rounds whose policy is kept"
        yield (
            f"  plus waits for the file system{which}: {SHARE:.0%} of a round if it gives "
            f"{found.bandwidth(round_seconds) / memory.GB:,.1f} GB/s to all nodes together"
        )


def refuse(config: Config, nodes: int, as_jobs: bool) -> None:
    """Refuses policies on the nodes' own disks if some stage could not find them.

    Args:
        config: a run's configuration.
        nodes: number of nodes of the SLURM job that runs all stages; 1 on a single machine.
        as_jobs: True if each stage is a SLURM job.

    Raises:
        UserError: a node would not have them, or a lost policy could not be reproduced.
    """
    if config.node_folder is None:
        return
    why = ""
    if as_jobs:
        why = "each stage is a SLURM job, perhaps on another node: use `rloo submit` without --controller"
    elif nodes != config.deepspeed.nodes:
        why = f"deepspeed.nodes is {config.deepspeed.nodes}, but stages run on {nodes}: set it to {nodes}"
    elif nodes > 1 and config.workers == "never":
        why = "on several nodes it needs warm workers: do not set workers: never"
    elif devices.has_gpu() and not config.reproducible:
        why = "a lost policy would be trained again with different rounding: set reproducible: true"
    if why:
        raise UserError(f"exchange: {config.exchange}: {why}, or leave exchange out")


def node_line(config: Config, shape: ModelDims) -> str:
    """The plan's line on policies on the nodes' own disks: the space that they take there and save elsewhere."""
    policy = memory.RunMemory(config, shape).policy / memory.GB
    count = config.rounds - sum(map(config.keeps, range(1, config.rounds + 1)))
    most = min(count, 2 + config.rollout.lag)
    return (
        f"exchange: {count:,} of {config.rounds:,} policies stay in each node's {config.node_folder}, {most} at a time "
        f"({policy * most:,.1f} GB), so {policy * count:,.1f} GB less go to the shared file system; after a kill, the "
        "rounds since the last trainer state are trained again"
    )
