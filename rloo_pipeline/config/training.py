"""Sections `update` and `deepspeed`."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rloo_pipeline.config.section import JSON, Beta, OptimizerName, Section, flatten, nest
from rloo_pipeline.runtime.installation import csv_rows

DECIDED_BY = {row["key"]: row["decided_by"] for row in csv_rows("config/deepspeed_keys.csv")}
"""Keys of DeepSpeed that cannot be set in `deepspeed.config` → the keys here, or other causes, that they follow from.
"""
LORA_LEARNING_RATE = 1e-5
"""Default learning rate of an adapter: ten times that of full training ("LoRA Without Regret")."""


def check_pattern(modules: list[str] | str) -> list[str] | str:
    """Returns a list or a valid regular expression; otherwise raises ValueError."""
    if isinstance(modules, str):
        try:
            re.compile(modules)
        except re.error as error:
            raise ValueError(f"{modules}: not a regular expression ({error})") from None
    return modules


class Lora(Section):
    """LoRA adapter (PEFT), trained instead of all weights. The defaults of `lora_alpha`, `target_modules` and
    `update.learning_rate` come from "LoRA Without Regret" (Schulman et al. 2025), where adapters learn from rewards as
    well as full training does.
    """

    r: int = Field(16, ge=1, le=512)
    """Rank of the adapter; vLLM serves up to 512."""
    lora_alpha: int = Field(32, ge=1)
    """Scale: the output of the adapter is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability at the input of the adapter."""
    use_rslora: bool = False
    """Scale by lora_alpha / √r instead (rsLoRA, arXiv 2312.03732)."""
    target_modules: Annotated[list[str] | str, AfterValidator(check_pattern)] = "all-linear"
    """Modules that get an adapter: names, a regular expression that matches whole names, or `all-linear`. In
    vision-language models, only modules of the language model get one.
    """

    @property
    def is_pattern(self) -> bool:
        """True if `target_modules` is a regular expression."""
        return isinstance(self.target_modules, str) and self.target_modules != "all-linear"

    def is_on(self, layer: str) -> bool:
        """True if a layer at the top of the model, such as `lm_head`, gets an adapter; with `all-linear` none does."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, layer) is not None
        return layer in self.target_modules


class Update(Section):
    """Optimizer and learning rate of the RLOO updates."""

    optimizer: OptimizerName = "adamw"
    """`adamw_8bit` is bitsandbytes' AdamW, with 8-bit moments for tensors of 4096 or more numbers. `adafactor` is that
    of transformers with TRL's options: no momentum, and factored second moments for matrices. `muon` is torch's Muon
    for the layers' matrices, with its steps scaled to match AdamW's, and AdamW for the rest. See
    [Performance](performance.md#less-memory).
    """

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. With `lora` the default is 1e-5, ten times that of full training, at any rank."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up, over `lr_horizon_rounds`."""
    lr_horizon_rounds: int | None = Field(None, ge=1)
    """Rounds over which the learning rate decays; required by `linear` and `cosine`. It is independent of `rounds`, so
    that finished rounds stay valid when a run is extended.
    """
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at and after the horizon, as a fraction of the peak."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up, fewer than `lr_horizon_rounds` has. The first step has 1 / `warmup_steps` of
    the peak (0 in TRL), the last one the peak.
    """
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's β₁ and β₂."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on all trained weights except biases and norms, as in transformers and TRL."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    disable_dropout: bool = True
    """Turn off the dropout that the model's config.json sets. With `false`, dropout is active in optimizer steps and in
    the old log-probs that they are compared with, with different random masks in each pass. `lora_dropout` is not
    affected.
    """
    torch_compile: bool = False
    """Compile the model's layers, except attention, with torch.compile when the engine starts. The stage fails if the
    compiled layers do not give what plain transformers gives. Needs g++ on CPUs and gcc on GPUs. Excludes
    `deepspeed.zero_stage: 3`, `model.quantization`, `reproducible`, prompts with images and mixtures of experts.
    """
    lora: Lora | None = None
    """Train a LoRA adapter instead of all weights. Off by default."""

    @model_validator(mode="before")
    @classmethod
    def _fill_learning_rate(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("lora") is not None and "learning_rate" not in values:
            return {**values, "learning_rate": LORA_LEARNING_RATE}
        return values

    def _problems(self) -> Iterator[str]:
        if self.lr_scheduler_type != "constant" and self.lr_horizon_rounds is None:
            yield f"lr_scheduler_type: {self.lr_scheduler_type} needs lr_horizon_rounds; set it"

    def note(self, rounds: int) -> str | None:
        """A sentence if the last rounds of a run do not change the policy."""
        horizon = self.lr_horizon_rounds
        if horizon is None or self.min_lr_ratio or rounds <= horizon:
            return None
        return (
            f"update.lr_horizon_rounds: {horizon} with min_lr_ratio: 0: after round {horizon} the learning rate is 0, "
            f"so {rounds - horizon} of {rounds} rounds change nothing; raise one of the two, or lower rounds"
        )


class Offload(Section):
    """Parts of an update that are kept in host memory (`cpu`: DeepSpeed's ZeRO-Offload) or in files on disk (`nvme`:
    ZeRO-Infinity) instead of the GPU's memory.
    """

    optimizer: Literal["cpu", "nvme"] | None = None
    """The optimizer's state and the float32 copies of the weights. AdamW then runs on the CPU. Needs `zero_stage` 1, 2
    or 3. `nvme` needs 3.
    """
    parameters: Literal["cpu", "nvme"] | None = None
    """The weights, which come to the GPU layer by layer. `cpu` needs `zero_stage` 3 and an `optimizer`; `nvme` needs
    `optimizer: nvme` and `model.dtype: bfloat16`.
    """

    @property
    def on_disk(self) -> bool:
        """True if anything is offloaded to disk."""
        return self.optimizer == "nvme"


class Deepspeed(Section):
    """Resources of the training engine (DeepSpeed). A trainer state can only be continued with the `processes` and
    `zero_stage` that wrote it. Changing one of these two, `communication_data_type`, `offload` or `config` reruns
    updates, SFT and the reward model; the other keys rerun nothing and apply to rounds that have not run yet.
    """

    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens (prompt and completion) per forward and backward pass, over all processes that share it
    (`sequence_parallel`). Bounds memory; changes results only by rounding and, with dropout (`lora_dropout`,
    `disable_dropout: false`), by the dropout masks. `auto` uses as many as fit on the GPUs according to the estimate of
    `rloo plan`, and 16384 on CPUs.
    """
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage. 1 partitions the optimizer state over the processes, 2 also the gradients, 3 also the
    weights, except for models with Mamba or DeltaNet layers. In 16-bit formats the optimizer state is always
    partitioned.
    """
    communication_data_type: Literal["float32", "model"] = "float32"
    """Number format of the gradient all-reduce. With `float32`, several processes compute the same step as one process,
    unless there is dropout or the optimizer is `muon`, which rounds to bfloat16. `model` uses `model.dtype`: in 16 bits
    it halves the traffic and rounds every sum. In bfloat16 the relative error of the gradient norm is then about 1e-3,
    and Adam can move weights with small gradients in the wrong direction.
    """
    processes: int = Field(1, ge=1)
    """Processes (ranks) of one update, one per GPU."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of processes that split the tokens of a micro-batch evenly, for sequences whose activations do not fit on
    one GPU. Must divide `processes` and the number of attention heads; the rest is data parallel. Passes without
    gradients then also run on all processes. See [Performance](performance.md#long-sequences).
    """
    nodes: int = Field(1, ge=1)
    """Nodes of the SLURM job over which the processes are spread evenly. Does not change results."""
    gradient_checkpointing: bool | Literal["auto", "offload"] = "auto"
    """Recompute activations in the backward pass instead of storing them: less memory, more computation, the same
    result. `auto` does so if the estimate of `rloo plan` without it exceeds the memory of the smallest GPU (on CPUs, of
    the smallest machine). `offload` does so too, and keeps the layer inputs, which are still stored, in host memory.
    """
    offload: Offload = Offload()
    """Parts to keep in host memory or on the node's disk."""
    nvme_path: str | None = None
    """Folder on a fast local disk for `offload: nvme`; it may contain variables such as `$SLURM_TMPDIR`. Default: the
    folder for temporary files (`$TMPDIR`), which is refused if it is in memory (tmpfs), as on some clusters. Its files
    are removed when the update ends.
    """
    config: str | JSON | None = None
    """More keys of DeepSpeed's configuration, or a JSON file with them. They are merged with the rest. Values of `auto`
    are dropped, and keys that this configuration decides are refused. Reruns depend on the file's content.
    """
    threads: int = Field(1, ge=1)
    """CPU threads per process. A fixed number, independent of the machine, so that sums round the same everywhere."""

    @property
    def own_keys(self) -> JSON:
        """The keys of `config`."""
        return self.config if isinstance(self.config, dict) else {}

    @property
    def micro_batch_tokens(self) -> int:
        """`max_tokens_per_micro_batch` as a number; 16384 if `auto` has not been resolved."""
        return 16384 if self.max_tokens_per_micro_batch == "auto" else self.max_tokens_per_micro_batch

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes activations; false while the key is still `auto`."""
        return self.gradient_checkpointing in (True, "offload")

    @property
    def splits_weights(self) -> bool:
        """True if no process holds all weights."""
        return self.zero_stage == 3 and self.processes > 1

    @property
    def splits_passes(self) -> bool:
        """True if no process holds all weights or all activations, so that passes without gradients run on all
        processes.
        """
        return self.splits_weights or self.sequence_parallel > 1

    @property
    def forward_processes(self) -> int:
        """Number of processes of a pass without gradients."""
        return self.processes if self.splits_passes else 1

    @field_validator("config")
    @classmethod
    def _read_config(cls, value: str | JSON | None) -> JSON | None:
        """Reads the keys from a JSON file, so that its content, not its name, is the configuration."""
        if isinstance(value, str):
            try:
                content = json.loads(Path(value).read_text())
            except (OSError, ValueError) as error:
                raise ValueError(f"{value}: no JSON file that can be read ({error})") from None
            if not isinstance(content, dict):
                raise ValueError(f"{value}: holds no JSON object; write DeepSpeed's keys as one")
            value = content
        if value is None:
            return None
        keys = {key: content for key, content in flatten(value).items() if content != "auto"}
        for key, (owned, instead) in product(keys, DECIDED_BY.items()):
            if f"{key}.".startswith(f"{owned}."):
                raise ValueError(f"{key} cannot be set there; it follows from {instead}, so remove it")
        return nest(keys)

    def _problems(self) -> Iterator[str]:
        if self.offload.optimizer is not None and self.zero_stage == 0:
            yield "offload.optimizer needs zero_stage 1, 2 or 3; set it"
        if self.offload.parameters is not None and (self.zero_stage != 3 or self.offload.optimizer is None):
            yield "offload.parameters needs zero_stage: 3 and offload.optimizer; set both"
        if self.offload.optimizer == "nvme" and self.zero_stage != 3:
            yield "offload.optimizer: nvme needs zero_stage: 3; set it, or offload.optimizer: cpu"
        if self.offload.parameters == "nvme" and self.offload.optimizer != "nvme":
            yield "offload.parameters: nvme needs offload.optimizer: nvme; set it, or parameters: cpu"
        if self.nvme_path is not None and not self.offload.on_disk:
            yield "nvme_path has no effect without offload.optimizer: nvme; remove one, or set the other"
        if self.processes % self.sequence_parallel:
            yield f"sequence_parallel ({self.sequence_parallel}) does not divide processes ({self.processes})"
        if self.processes % self.nodes:
            yield f"processes ({self.processes}) is not a multiple of nodes ({self.nodes})"
