"""GPUs that a stage takes, by the role of its worker."""

from __future__ import annotations

from collections.abc import Iterable

from rloo_pipeline.config import Config
from rloo_pipeline.workers import client


def of_stage(stage: str, configs: Iterable[Config]) -> int:
    """GPUs that a stage takes; of the runs of an experiment those of the run that takes most.

    Args:
        stage: its command, such as `rollout`; one that Snakemake counts among those with GPUs.
        configs: of the runs.
    """
    return max(of_role(role_of(stage), config) for config in configs)


def role_of(stage: str) -> str:
    """The role whose engine a stage has; `scorer` for one without an engine."""
    return {"warmstart": "trainer", "harness": "sampler"}.get(stage, client.ROLES.get(stage, "scorer"))


def of_role(role: str, config: Config) -> int:
    """GPUs of a worker's stages; those of a `scorer` only where a reward function has some."""
    of_rewards = max((reward.gpus for reward in config.rewards), default=0)
    if role == "sampler":  # whose reward functions take turns with the engine
        return max(config.vllm.tensor_parallel_size, of_rewards) + config.rollout.environment_gpus
    if role == "logprobs":
        return config.deepspeed.forward_processes
    if role == "trainer":
        return config.deepspeed.processes
    return of_rewards
