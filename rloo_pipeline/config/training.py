"""Sections on the optimizer step."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rloo_pipeline.config.section import Section


class Lora(Section):
    """Train a LoRA adapter (PEFT) instead of all weights."""

    r: int = Field(16, ge=1)
    """Rank."""
    lora_alpha: int = Field(32, ge=1)
    """Scale; the update is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapter."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter."""


class Update(Section):
    """The optimizer step: DeepSpeed and AdamW."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over lr_horizon_rounds."""
    lr_horizon_rounds: int | None = Field(None, ge=1)
    """Rounds over which the learning rate falls; a key of its own so that a longer run leaves done rounds as they are.
    Needed by linear and cosine.
    """
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at and after the horizon, as a share of the peak."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip to."""
    disable_dropout: bool = True
    """Whether dropout that the model's config.json asks for is left out. With `false` it is on in optimizer steps and
    in the old log-probs that they are compared with, and each pass drops something else. lora_dropout is a key of its
    own.
    """
    lora: Lora | None = None
    """Train a LoRA adapter instead of all weights."""

    @model_validator(mode="after")
    def _horizon(self) -> Self:
        if self.lr_scheduler_type != "constant" and self.lr_horizon_rounds is None:
            raise ValueError(f"lr_scheduler_type {self.lr_scheduler_type} needs lr_horizon_rounds")
        return self


class Deepspeed(Section):
    """The training engine's place on the machine. A trainer state goes on with the processes and the ZeRO stage that
    wrote it; the other keys, but for communication_data_type, run nothing again and hold for rounds that run from then
    on.
    """

    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Tokens (prompt and completion) that go through the model at once; bounds memory, changes no result beyond
    rounding.
    """
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: what is split over processes (1 optimizer, 2 and gradients, 3 and weights); in 16 bits the
    optimizer always is.
    """
    communication_data_type: Literal["float32", "model"] = "float32"
    """Number format in which gradients are summed over processes; where it is float32, several processes take the step
    of one. `model`, the format of model.dtype, sends half as much in 16 bits and rounds every sum: in bfloat16 the
    gradient's norm is then off by some 1e-3 of itself, and weights that Adam moves in steps of the learning rate go
    other ways where their gradients are small.
    """
    processes: int = Field(1, ge=1)
    """Processes of one update: one a GPU."""
    nodes: int = Field(1, ge=1)
    """Nodes of a SLURM job that the processes are spread over, equally many on each; changes no result."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    threads: int = Field(1, ge=1)
    """CPU threads of one process; fixed here and not by the machine, so that sums round alike everywhere."""

    @model_validator(mode="after")
    def _spread(self) -> Self:
        if self.processes % self.nodes:
            raise ValueError(f"nodes ({self.nodes}) does not divide processes ({self.processes})")
        return self
