"""Resolves `auto` in `deepspeed`: activations are recomputed if training would not fit into memory otherwise, and GPUs
get the largest micro-batches that fit.

Recomputed activations are bitwise equal to stored ones. Micro-batches of different sizes round differently, so the size
depends only on the configuration and the card.
"""

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import memory
from rloo_pipeline.config import Config, OptimizerName
from rloo_pipeline.runtime import devices, ranks

MOST, STEP = 65536, 1024
"""Maximum number of tokens in a micro-batch, since more gain nothing. Sizes are multiples of STEP, so that they do not
change with the few bytes that a driver reserves.
"""


def resolve(config: Config, shape: ModelDims | None, whole: OptimizerName | None = None) -> Config:
    """Calls `resolve_for` with the memory of this job's ranks. If config.json has no known sizes, nothing is recomputed
    and micro-batches have their fixed size.
    """
    if shape is None:
        if config.deepspeed.gradient_checkpointing != "auto":
            return config
        return config.override({"deepspeed.gradient_checkpointing": False})
    return resolve_for(config, shape, devices.device_type(), _room(), whole)


def _room() -> float:
    """Bytes that every rank of this job may use: the minimum over ranks, so that nodes with different memory decide
    alike.
    """
    room = devices.training_bytes()
    if ranks.current().world == 1:
        return room
    from rloo_pipeline.training.deepspeed_internals import split_model

    split_model.start_ranks()
    return min(ranks.gathered(room))


def resolve_for(
    config: Config, shape: ModelDims, device: str, room: float, whole: OptimizerName | None = None
) -> Config:
    """The configuration with each `auto` replaced by true or false, or by a number of tokens.

    Args:
        config: configuration of the run or of a stage that trains.
        shape: the model's dimensions.
        device: cpu or cuda.
        room: bytes that a process may use.
        whole: the optimizer, if all weights are trained with full micro-batches, as in SFT; None for updates.
    """
    if config.deepspeed.gradient_checkpointing == "auto":
        tokens = None if whole is None else config.deepspeed.micro_batch_tokens
        without = config.override({"deepspeed.gradient_checkpointing": False})
        fits = _fits(without, shape, device, room, whole, tokens)
        config = config.override({"deepspeed.gradient_checkpointing": not fits})
    if config.deepspeed.max_tokens_per_micro_batch == "auto" and device == "cuda":
        sizes = range(MOST * config.deepspeed.sequence_parallel, STEP, -STEP)
        most = next((size for size in sizes if _fits(config, shape, device, room, whole, size)), STEP)
        config = config.override({"deepspeed.max_tokens_per_micro_batch": most})
    return config


def _fits(
    config: Config, shape: ModelDims, device: str, room: float, whole: OptimizerName | None, tokens: int | None
) -> bool:
    """True if an update with micro-batches of `tokens` (None: the largest) should fit into `room` bytes."""
    if whole is not None:
        config = config.override({"update.lora": None, "update.optimizer": whole})
    own = None if tokens is None else tokens // config.deepspeed.sequence_parallel
    # completions are mostly shorter than the longest one, so that the same number of tokens has more prompts
    copies = 1.0 if whole is not None else memory.copies(config, config.rollout.max_completion_length / 4)
    batch = None if own is None else memory.MicroBatch(own, own, several=True, copies=copies)
    terms = memory.RunMemory(config, shape, device).update(batch, distills=whole is None)
    return memory.total(terms) <= room * memory.ROOM
