"""Estimates time, bandwidth and space for passing a round's policy from the trainer to the samplers, as files on the
shared file system or on the nodes' own disks (`exchange`).
"""

from collections.abc import Iterator

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import layouts, memory, speeds
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices

SHARE = 0.1
"""Maximum share of a round that should be spent waiting for the file system."""


def lines(config: Config, shape: ModelDims, round_seconds: float) -> Iterator[str]:
    """Yields lines for the plan; none for a policy of less than 1 GB.

    A policy is written once, by the ranks of an update, and read once by the update and by each sampling node, which
    digests it and loads it into its engines.
    """
    policy = memory.RunMemory(config, shape).policy
    if policy < memory.GB:
        return
    writers = config.deepspeed.processes if config.update.lora is None else 1
    nodes = -(-config.rollout.shards * config.sampler_gpus // layouts.PER_NODE)
    read = policy / (speeds.DIGESTING.typical * manifest.READERS)
    read += policy / (speeds.LOADING.typical * config.vllm.tensor_parallel_size)
    yield (
        f"policy of a round: {policy / memory.GB:,.1f} GB; writing takes about "
        f"{policy / (speeds.WRITING.typical * writers):,.1f} s and reading {read:,.1f} s (estimated from the speed of "
        "one CPU core),"
    )
    which = "" if config.node_folder is None else ", in rounds whose policy is kept"
    bandwidth = policy * (2 + nodes) / (SHARE * round_seconds)
    yield (
        f"  plus waits for the file system{which}: {SHARE:.0%} of a round if it gives "
        f"{bandwidth / memory.GB:,.1f} GB/s to all nodes together"
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
