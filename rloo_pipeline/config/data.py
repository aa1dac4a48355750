"""Sections on the model, the prompts and the warm start."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rloo_pipeline.config.section import JSON, Dtype, Section


class Model(Section):
    """The model to train: a folder, a Hub id, or a function that makes one."""

    name_or_path: str | None = None
    """Hub id or local folder of a causal language model with safetensors weights and a tokenizer."""
    revision: str | None = None
    """Commit, tag or branch of a Hub model; what it points to when first staged is kept in assets.json."""
    build: str | None = None
    """`module:function` or `file.py:function` that writes a model folder: `f(folder, seed, **options)`."""
    build_options: JSON = {}
    """Keyword arguments of `build`."""
    dtype: Dtype = "bfloat16"
    """Number format of the weights in the policies and in the sampler; the optimizer keeps float32 master weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name_or_path is None) == (self.build is None):
            raise ValueError("give exactly one of name_or_path and build")
        return self


class Source(Section):
    """Where rows come from: exactly one of name, path and generator."""

    name: str | None = None
    """Hub id of a dataset, or a folder that `datasets.load_dataset` reads."""
    path: str | None = None
    """A .jsonl, .json or .parquet file, relative to `data_dir` where that is set."""
    generator: str | None = None
    """`module:function` or `file.py:function` that returns a list of rows: `f(**options)`."""
    options: JSON = {}
    """Keyword arguments of `generator`."""
    config_name: str | None = None
    """Configuration (subset) of a Hub dataset, such as `main`."""
    split: str = "train"
    """Split of a Hub dataset."""
    revision: str | None = None
    """Commit, tag or branch of a Hub dataset; what it points to when first staged is kept in assets.json."""
    max_rows: int | None = Field(None, ge=1)
    """Use only the first rows."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.name, self.path, self.generator)) != 1:
            raise ValueError("give exactly one of name, path and generator")
        return self


class Dataset(Section):
    """The prompts to train on and to evaluate on, and how a row becomes a prompt."""

    train: Source
    """Rows whose prompts are trained on."""
    eval: Source
    """Held-out rows; a row of `train` with the same prompt as one of these is dropped from `train`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a list of messages (chat template applied) or a string (passed through as it is)."""
    user_prompt: str | None = None
    """Template over the columns, such as `"{question}\\nAnswer:"`, that makes a user message; replaces
    prompt_column.
    """
    system_prompt: str | None = None
    """System message put before every conversation."""
    chat_template_kwargs: JSON = {}
    """Passed to the chat template, such as `{enable_thinking: true}`."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens; longer ones are dropped and counted."""


class Sft(Section):
    """Supervised fine-tuning before RLOO, on demonstrations."""

    demonstrations: Source
    """Rows with the prompt (as in `dataset`) and a `completion`: text or a list with one assistant message."""
    completion_column: str = "completion"
    """Column with the completion to imitate."""
    steps: int = Field(200, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations in an optimizer step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip to."""


class Warmstart(Section):
    """How policy 0 comes to be."""

    sft: Sft | None = None
    """Train on demonstrations first; without it the model is taken as it is."""


class Checks(Section):
    """What policy 0 must be able to do before rounds are paid for."""

    probe_prompts: int = Field(64, ge=1)
    """Training prompts that policy 0 is tried on."""
    probe_num_generations: int | None = Field(None, ge=2)
    """Samples a probe prompt; rollout.num_generations where not given."""
