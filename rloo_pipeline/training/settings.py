"""Settings of the DeepSpeed engine, read from the configuration."""

import math
from typing import Literal, NamedTuple, Self

from rloo_pipeline.config import Config, Deepspeed, Dtype, Lora, OptimizerName, Sft, Update


class LearningRate(NamedTuple):
    """Linear warm-up, then constant or a linear or cosine decay to `min_ratio` of the peak.

    The decay ends at step `horizon`; later steps keep its last value.
    """

    peak: float
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    """Number of optimizer steps in the warm-up."""
    horizon: int = 0
    """Optimizer step at which the decay ends, after the warm-up."""
    min_ratio: float = 0.0

    def at_step(self, step: int) -> float:
        """Learning rate of an optimizer step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup) / (self.horizon - self.warmup))
        decay = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * decay)


class TrainerSettings(NamedTuple):
    """Settings of one engine; two engines with equal settings are interchangeable.

    The defaults train all weights with AdamW in one process, at temperature 1.
    """

    dtype: Dtype
    learning_rate: LearningRate
    adam_betas: tuple[float, float]
    temperature: float = 1.0
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lora: Lora | None = None
    disable_dropout: bool = True
    """Switches off the dropout of the model's own config.json; LoRA dropout stays."""
    optimizer: OptimizerName = "adamw"
    quantization: Literal["nf4"] | None = None
    """Number format of an adapter's frozen base."""
    torch_compile: bool = False
    train_vision: bool = False
    """True if the vision encoder of a model with images is trained too."""
    deepspeed: Deepspeed = Deepspeed()

    @property
    def uses_dropout(self) -> bool:
        """True if any dropout is active in training."""
        return not self.disable_dropout or (self.lora is not None and self.lora.lora_dropout > 0)

    @property
    def weights_in_state(self) -> bool:
        """True if a trainer state includes the weights, which ZeRO 3 and adapters lay out in their own way. Otherwise
        they are in the policy that the state's manifest names.
        """
        return self.deepspeed.zero_stage == 3 or self.lora is not None

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Settings of the stage `update`."""
        steps = config.algorithm.num_iterations * config.algorithm.steps_per_generation
        settings = cls.of_section(config, config.update, (config.update.lr_horizon_rounds or 0) * steps)
        return settings._replace(
            temperature=config.rollout.temperature,
            quantization=config.model.quantization,
            train_vision=config.model.train_vision,
        )

    @classmethod
    def of_section(cls, config: Config, section: Update | Sft, horizon: int) -> Self:
        """Settings to train at temperature 1.

        Args:
            config: a configuration with the sections `model` and `deepspeed`.
            section: the stage's section; its keys that are named like fields are taken as they are.
            horizon: optimizer steps until the learning rate is at its minimum.
        """
        taken = {name: getattr(section, name) for name in cls._fields if name in type(section).model_fields}
        taken["learning_rate"] = LearningRate(
            section.learning_rate, section.lr_scheduler_type, section.warmup_steps, horizon, section.min_lr_ratio
        )
        return cls(**taken, dtype=config.model.dtype, deepspeed=config.deepspeed)
