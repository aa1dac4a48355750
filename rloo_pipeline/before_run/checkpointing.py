"""`deepspeed.gradient_checkpointing: auto`: on where training would not fit into memory without it.

Recomputed activations have the bits of stored ones, so the decision changes no result.
"""

from __future__ import annotations

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import advice, memory
from rloo_pipeline.config import Config, OptimizerName
from rloo_pipeline.runtime import devices


def resolve(config: Config, policy: Policy, whole: OptimizerName | None = None) -> Config:
    """`resolve_for` the model of a policy and the memory of this process; off where config.json has no known sizes."""
    if config.deepspeed.gradient_checkpointing != "auto":
        return config
    if (shape := policy.dimensions) is None:
        return advice.override(config, {"deepspeed.gradient_checkpointing": False})
    return resolve_for(config, shape, devices.device_type(), devices.training_bytes(), whole)


def resolve_for(
    config: Config, shape: ModelDims, device: str, room: float, whole: OptimizerName | None = None
) -> Config:
    """The configuration with true or false in place of `auto`.

    Args:
        config: configuration of the run or of a stage that trains.
        shape: the model's dimensions.
        device: cpu or cuda.
        room: bytes that a process may use.
        whole: the optimizer of a training of all weights with full micro-batches, such as SFT; None for updates.
    """
    if config.deepspeed.gradient_checkpointing != "auto":
        return config
    without, batch = advice.override(config, {"deepspeed.gradient_checkpointing": False}), None
    if whole is not None:
        tokens = config.deepspeed.max_tokens_per_micro_batch
        batch = memory.MicroBatch(tokens, tokens, several=True)
        trains_all = {"update.lora": None, "update.optimizer": whole}
        without = advice.override(without, trains_all)
    needed = memory.total(memory.update(without, shape, device, batch)) > room * memory.ROOM
    return advice.override(config, {"deepspeed.gradient_checkpointing": needed})
