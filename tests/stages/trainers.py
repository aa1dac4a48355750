"""The trainer's settings, of which a test says what matters to it."""

from typing import Any

from rloo_pipeline.config import Deepspeed
from rloo_pipeline.training.settings import LearningRate, TrainerSettings


def trainer_settings(rate: float = 0.0, **changes: Any) -> TrainerSettings:
    """AdamW in float32 on one process, at a constant learning rate: 0 leaves the weights as they are.

    Args:
        rate: the learning rate.
        changes: further fields, and keys of the section `deepspeed`.
    """
    keys = {key: changes.pop(key) for key in Deepspeed.model_fields.keys() & changes.keys()}
    settings = TrainerSettings("float32", LearningRate(rate), adam_betas=(0.9, 0.99))
    return settings._replace(deepspeed=Deepspeed().model_copy(update=keys), **changes)


def use_micro_batches(engine: Any, tokens: int) -> None:
    """Makes an engine that exists take micro-batches of so many tokens."""
    keys = engine.settings.deepspeed.model_copy(update={"max_tokens_per_micro_batch": tokens})
    engine.settings = engine.settings._replace(deepspeed=keys)
