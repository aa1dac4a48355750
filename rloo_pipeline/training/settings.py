"""What a trainer needs to know of the configuration, one value a field."""

from __future__ import annotations

from typing import NamedTuple, Self

from rloo_pipeline.config import Config, Dtype, Lora
from rloo_pipeline.training.schedule import Schedule


class Settings(NamedTuple):
    """What an engine needs to know; filled from the configuration's sections."""

    dtype: Dtype
    trust_remote_code: bool
    temperature: float
    schedule: Schedule
    adam_betas: tuple[float, float]
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    zero_stage: int
    gradient_checkpointing: bool
    lora: Lora | None
    communication_data_type: str = "float32"
    disable_dropout: bool = True
    """Of the model's own."""

    @property
    def drops(self) -> bool:
        """Whether something is dropped while it trains."""
        return not self.disable_dropout or (self.lora is not None and self.lora.lora_dropout > 0)

    @classmethod
    def of_update(cls, config: Config) -> Self:
        """Those of the stage `update`; the horizon of the learning rate is counted in optimizer steps."""
        section = config.update
        steps = config.algorithm.num_iterations * config.algorithm.steps_per_generation
        horizon = (section.lr_horizon_rounds or 0) * steps
        return cls(
            dtype=config.model.dtype,
            trust_remote_code=config.model.trust_remote_code,
            temperature=config.rollout.temperature,
            schedule=Schedule(
                section.learning_rate, section.lr_scheduler_type, section.warmup_steps, horizon, section.min_lr_ratio
            ),
            adam_betas=section.adam_betas,
            adam_epsilon=section.adam_epsilon,
            weight_decay=section.weight_decay,
            max_grad_norm=section.max_grad_norm,
            zero_stage=config.deepspeed.zero_stage,
            gradient_checkpointing=config.deepspeed.gradient_checkpointing,
            lora=section.lora,
            communication_data_type=config.deepspeed.communication_data_type,
            disable_dropout=section.disable_dropout,
        )
