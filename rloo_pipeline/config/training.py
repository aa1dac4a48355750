"""Sections `update` and `deepspeed`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rloo_pipeline.config.section import Section


class Lora(Section):
    """LoRA adapter (PEFT), trained instead of all weights."""

    r: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """Scale: the output of the adapter is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability at the input of the adapter."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter, by name, or `all-linear`."""


class Update(Section):
    """Optimizer (AdamW) and learning rate of the RLOO updates."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up, over `lr_horizon_rounds`."""
    lr_horizon_rounds: int | None = Field(None, ge=1)
    """Rounds over which the learning rate decays; required by `linear` and `cosine`. It is independent of `rounds`, so
    that finished rounds stay valid when a run is extended.
    """
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at and after the horizon, as a fraction of the peak."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's β₁ and β₂."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    disable_dropout: bool = True
    """Turn off the dropout that the model's config.json sets. With `false`, dropout is active in optimizer steps and in
    the old log-probs that they are compared with, with different random masks in each pass. `lora_dropout` is not
    affected.
    """
    lora: Lora | None = None
    """Train a LoRA adapter instead of all weights. Off by default."""

    @model_validator(mode="after")
    def _check_horizon(self) -> Self:
        if self.lr_scheduler_type != "constant" and self.lr_horizon_rounds is None:
            raise ValueError(f"lr_scheduler_type: {self.lr_scheduler_type} needs lr_horizon_rounds; set it")
        return self


class Deepspeed(Section):
    """Resources of the training engine (DeepSpeed). A trainer state can only be continued with the `processes` and
    `zero_stage` that wrote it. These two and `communication_data_type` rerun updates when they change; the other keys
    rerun nothing and apply to rounds that have not run yet.
    """

    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Tokens (prompt and completion) per forward and backward pass. Bounds memory; changes results only by rounding."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. 1 partitions the optimizer state over the processes, 2 also the gradients, 3 also the
    weights. In 16-bit formats the optimizer state is always partitioned.
    """
    communication_data_type: Literal["float32", "model"] = "float32"
    """Number format of the gradient all-reduce. With `float32` several processes compute the same step as one process.
    `model` uses `model.dtype`: in 16 bits it halves the traffic and rounds every sum. In bfloat16 the relative error of
    the gradient norm is then about 1e-3, and Adam can move weights with small gradients in another direction.
    """
    processes: int = Field(1, ge=1)
    """Processes (ranks) of one update, one per GPU."""
    nodes: int = Field(1, ge=1)
    """Nodes of the SLURM job over which the processes are spread evenly. Changes no result."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, more computation."""
    threads: int = Field(1, ge=1)
    """CPU threads per process. A fixed number, independent of the machine, so that sums round the same everywhere."""

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.processes % self.nodes:
            raise ValueError(f"processes ({self.processes}) is not a multiple of nodes ({self.nodes})")
        return self
