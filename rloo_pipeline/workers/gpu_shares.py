"""Number of GPUs that a stage takes, by the role of its worker."""

from __future__ import annotations

from collections.abc import Iterable

from rloo_pipeline.config import Config
from rloo_pipeline.workers import client


def of_stage(stage: str, configs: Iterable[Config]) -> int:
    """Number of GPUs that a stage takes; in an experiment, the maximum over its runs.

    Args:
        stage: command of a GPU stage, such as `rollout`.
        configs: configurations of the runs.
    """
    return max(of_role(role_of(stage), config) for config in configs)


def role_of(stage: str) -> str:
    """Role whose engine a stage uses; `scorer` if it needs no engine."""
    return {"warmstart": "trainer", "harness": "sampler"}.get(stage, client.ROLES.get(stage, "scorer"))


def of_role(role: str, config: Config) -> int:
    """Number of GPUs for a role's stages; a `scorer` has GPUs only if a reward function needs them."""
    of_rewards = max((reward.gpus for reward in config.rewards), default=0)
    if role == "sampler":  # whose reward functions take turns with the engine
        return max(config.vllm.tensor_parallel_size, of_rewards) + config.rollout.environment_gpus
    if role == "logprobs":
        return config.deepspeed.forward_processes
    if role == "trainer":
        return config.deepspeed.processes
    return of_rewards
