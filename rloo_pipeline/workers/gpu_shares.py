"""Number of GPUs that a stage takes, by the role of its worker."""

from collections.abc import Iterable, Mapping

from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.stages.table import ROWS
from rloo_pipeline.workers import client

ROLES: Mapping[str, str] = client.ROLES | {row.stage: row.engine for row in ROWS if row.engine}
"""Role whose engine a stage uses, also where no worker keeps it."""


def of_stage(stage: str, configs: Iterable[Config]) -> int:
    """Number of GPUs that a stage takes; in an experiment, the maximum over its runs.

    Args:
        stage: command of a GPU stage, such as `rollout`.
        configs: configurations of the runs.
    """
    return max(of_role(role_of(stage), config) for config in configs)


def role_of(stage: str) -> str:
    """Role whose engine a stage uses; `scorer` if it needs no engine."""
    return ROLES.get(stage, "scorer")


def can_keep(role: str, config: Config, on_gpus: bool) -> bool:
    """True if a worker can keep the engine of a role. With several ranks, the engine must be able to leave the GPUs;
    with one process, a worker tries.
    """
    section = config.deepspeed
    leaves_gpus = section.zero_stage < 3 and section.offload.optimizer is None
    return ranks_of(role, config) == 1 or leaves_gpus or not on_gpus


def over_nodes(config: Config) -> frozenset[str]:
    """Roles whose ranks run on several nodes."""
    roles = ("logprobs", "trainer") if config.deepspeed.nodes > 1 else ()
    return frozenset(role for role in roles if ranks_of(role, config) > 1)


def ranks_of(role: str, config: Config) -> int:
    """Number of ranks that torchrun or srun starts for a role's stages; vLLM starts its own processes."""
    return of_role(role, config) if role in ("logprobs", "trainer") else 1


def of_role(role: str, config: Config) -> int:
    """Number of GPUs for a role's stages; a `scorer` has GPUs only if a reward function needs them."""
    of_rewards = max((reward.gpus for reward in config.rewards), default=0)
    if role == "sampler":  # reward functions take turns with the engine
        return max(config.vllm.gpus, of_rewards) + config.rollout.environment_gpus
    if role == "logprobs":
        return config.deepspeed.forward_processes
    if role == "trainer":
        return config.deepspeed.processes
    return of_rewards


def idle(roles: Iterable[str], config: Config) -> str:
    """The roles whose idle engines hold GPU memory, for RLOO_WARM; a scorer once for each of its models."""
    models = config.reward_models_on_gpus
    return " ".join(
        sorted(role for role in roles if role in devices.IDLE for _ in range(models if role == "scorer" else 1))
    )
