"""Sections on the model, the prompts and the warm start."""

from __future__ import annotations

from string import Formatter
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

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
    prompt_column. A brace that is meant is written twice: `'\\boxed{{}}'`.
    """
    system_prompt: str | None = None
    """System message put before every conversation; a prompt that is a string becomes a user message."""
    chat_template_kwargs: JSON = {}
    """Passed to the chat template, such as `{enable_thinking: true}`."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens; longer ones are dropped and counted."""

    @field_validator("user_prompt")
    @classmethod
    def _names_columns(cls, value: str | None) -> str | None:
        try:
            names = [name for _, name, *_ in Formatter().parse(value or "") if name is not None]
        except ValueError as error:
            raise ValueError(f"no template over the columns ({error}); write a brace that is meant twice") from None
        if any(not name.isidentifier() and not name[:1].isalpha() for name in names):
            raise ValueError("a pair of braces names no column; write braces that are meant twice: {{}}")
        return value


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
    disable_dropout: bool = True
    """Whether dropout that the model's config.json asks for is left out."""
    held_out: int = Field(0, ge=0)
    """Demonstrations that are not trained on, drawn with the seed, so that the checks can give their perplexity. Those
    of evaluation prompts are held out in any case.
    """


class Warmstart(Section):
    """How policy 0 comes to be."""

    sft: Sft | None = None
    """Train on demonstrations first; without it the model is taken as it is."""
    train: Literal["always", "auto"] = "always"
    """Whether SFT runs in any case, or only when the checks of the model as it is ask for it (`auto`); they run again
    on what comes of it.
    """


Limit = tuple[float | None, float | None]
ENGINES: dict[str, dict[str, Limit]] = {
    "logprob_difference": {"float32": (1e-3, 1e-2), "bfloat16": (0.1, 0.3), "float16": (0.02, 0.1)},
    "logprob_difference_q95": {"float32": (1e-3, 1e-2), "bfloat16": (0.4, 1.0), "float16": (0.1, 0.4)},
}
"""By number format, between what other kernels make of the same model and what a wrong mask makes of it: random models
of 4 to 32 layers against themselves in float32 differ by 0.01 to 0.04 in the mean in bfloat16 (with experts 0.16), by
0.001 to 0.02 in float16; with packed sequences that see each other by 0.8 to 2.5, without their window by 0.15 to 0.8.
"""


class Limits(Section):
    """Where each check warns and where it fails: `[warn, fail]`, null for never."""

    round_trip: Limit = (1, None)
    """Least share of prompts whose token ids stay the same as text and back."""
    double_bos: Limit = (None, 0)
    """Most prompts that begin with two BOS tokens."""
    generation_prompt: Limit = (1, None)
    """Least share of chats that end in what the template puts before an answer."""
    stop_ids: Limit = (0, None)
    """Most disagreements of tokenizer, generation config and template on the token that ends an answer."""
    pad_token: Limit = (0, None)
    """1 where the PAD token is an end token too, or the tokenizer has none and EOS stands for it."""
    packed_logprobs: Limit = (1e-4, 1e-3)
    """Most nats between the trainer's packed log-prob of a token and plain transformers', on a small copy of the model
    in float32.
    """
    logprob_difference: Limit | None = None
    """Most nats between vLLM's and the trainer's log-prob of a token: in float32 of any, [0.001, 0.01] where not given;
    in 16 bits in the mean, [0.1, 0.3] in bfloat16 and [0.02, 0.1] in float16.
    """
    logprob_difference_q95: Limit | None = None
    """The same, of all tokens but the 5% with the largest; where not given, [0.001, 0.01] in float32, [0.4, 1] in
    bfloat16 and [0.1, 0.4] in float16.
    """
    perplexity: Limit = (20, None)
    """Highest perplexity on demonstrations that SFT trains on."""
    perplexity_held_out: Limit = (20, None)
    """The same on demonstrations that it does not train on."""
    overfitting: Limit = (1.5, None)
    """The second divided by the first, at most."""
    scorable: Limit = (0.9, 0.01)
    """Least share of completions with a reward."""
    mean_reward: Limit = (None, None)
    """Lowest mean reward."""
    pass_at_1: Limit = (None, None)
    """Least chance that a completion is right."""
    pass_at_k: Limit = (0.1, None)
    """Least chance that one of K is right."""
    all_right: Limit = (0.5, None)
    """Most groups with nothing but right answers."""
    all_wrong: Limit = (0.8, None)
    """Most groups without a right answer."""
    mixed: Limit = (0.2, None)
    """Least share of groups with right and wrong answers."""
    wasted: Limit = (0.8, None)
    """Most completions that are expected in groups of all right or all wrong answers."""
    teaching: Limit = (0.2, 0.01)
    """Least share of groups with at least two different rewards: RLOO learns from no others."""
    truncated: Limit = (0.2, None)
    """Most completions that reach the length limit."""
    format_rate: Limit = (0.5, None)
    """Least share of completions in the form that `checks.format_reward` asks for."""
    entropy: Limit = (0.01, None)
    """Lowest mean entropy of a token in nats."""
    duplicates: Limit = (0.8, None)
    """Most completions that repeat a sibling word by word."""

    def by_name(self, dtype: str) -> dict[str, Limit]:
        """All of them, those of differences between engines for this number format."""
        limits = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: ENGINES[name][dtype] if limit is None else limit for name, limit in limits.items()}


class Checks(Section):
    """What policy 0 must be able to do before rounds are paid for."""

    probe_prompts: int = Field(64, ge=1)
    """Training prompts that policy 0 is tried on."""
    probe_num_generations: int | None = Field(None, ge=2)
    """Samples a probe prompt; rollout.num_generations where not given."""
    demonstrations: int = Field(64, ge=1)
    """Demonstrations, of those trained on and of the held-out ones, that perplexity is taken over."""
    format_reward: str | None = None
    """Reward function (of 0 and 1) that tells the form; the one named `format` where not given and there is one."""
    limits: Limits = Limits()
    """Limits."""
    accept: list[str] = []
    """Checks whose failure does not stop the run; it stays in checks.json and in the report."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in self.accept:
            if name not in Limits.model_fields:
                raise ValueError(f"accept: there is no check '{name}' (there are {', '.join(Limits.model_fields)})")
        return self
