"""The trainer's settings, of which a test says what matters to it."""

from typing import Any

from rloo_pipeline.training.learning_rate import LearningRate
from rloo_pipeline.training.settings import TrainerSettings


def trainer_settings(rate: float = 0.0, **changes: Any) -> TrainerSettings:
    """AdamW in float32 on one process, at a constant learning rate: 0 leaves the weights as they are.

    Args:
        rate: the learning rate.
        changes: further fields.
    """
    plain = TrainerSettings(
        dtype="float32",
        trust_remote_code=False,
        temperature=1.0,
        learning_rate=LearningRate(rate, "constant", 0, 0, 0.0),
        adam_betas=(0.9, 0.99),
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        zero_stage=0,
        gradient_checkpointing=False,
        lora=None,
    )
    return plain._replace(**changes)
