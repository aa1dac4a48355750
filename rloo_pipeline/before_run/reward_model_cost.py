"""Estimates memory and GPU-hours of the stage `reward_model`, which trains once, before the rounds."""

from __future__ import annotations

from typing import NamedTuple

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import advice, checkpointing, dataset_inputs, memory, model_inputs, speeds
from rloo_pipeline.before_run.cards import Card
from rloo_pipeline.config import Config


class RewardModelCost(NamedTuple):
    """Memory and GPU-hours of the stage."""

    terms: memory.Terms
    """Memory of one process."""
    tokens: float | None
    """Maximum number of tokens that it trains on; None if the preferences are not on this machine yet."""
    hours: float | None
    """GPU-hours; None without a card or without `tokens`."""
    problem: str
    """Why it does not fit on the card; empty if it fits, or on CPUs."""


def estimated(config: Config, shape: ModelDims, room: float, card: Card | None) -> RewardModelCost | None:
    """The cost of the stage; None if the run trains no reward model.

    Args:
        config: the run's configuration, before `checkpointing.resolve_for`.
        shape: dimensions of the run's model.
        room: bytes that a process may use.
        card: the GPU; None for CPUs.

    Raises:
        UserError: as for `model_inputs.shape` and `dataset_inputs.training_rows`.
    """
    section = config.reward_model
    if section is None:
        return None
    dims = model_inputs.shape(config.of_reward_model, "reward_model") if section.own_source else shape
    device = "cuda" if card else "cpu"
    config = advice.override(config.of_reward_model, {"update.lora": None, "update.optimizer": "adamw"})
    config = checkpointing.resolve_for(config, dims, device, room, "adamw")
    pairs, pair = section.batch_size / config.deepspeed.processes, 2 * section.max_length
    at_once = max(1.0, min(pairs, config.deepspeed.micro_batch_tokens // pair))
    # a head with one output has almost no logits
    batch = memory.MicroBatch(round(at_once * pair), 0, at_once < pairs)
    terms = memory.RunMemory(config, dims, device).update(batch, distills=False)
    problem = ""
    if card and memory.total(terms) > room * memory.ROOM:
        problem = f"reward_model takes {memory.total(terms) / memory.GB:,.0f} GB a GPU"
    rows = dataset_inputs.training_rows(config, dataset_inputs.PREFERENCES)
    tokens = None if rows is None else float(rows * section.num_train_epochs * pair)
    if card is None or tokens is None:
        return RewardModelCost(terms, tokens, None, problem)
    passes = 3 + config.deepspeed.recomputes
    work = 2.0 * dims.parameters * tokens * passes / (card.teraflops * 1e12 * speeds.TRAINING.typical)
    seconds = work + speeds.STARTS["update"].typical * config.deepspeed.processes
    return RewardModelCost(terms, tokens, seconds / 3600, problem)
