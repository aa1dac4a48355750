"""Sections `model`, `dataset` and `warmstart`."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rloo_pipeline.config.section import JSON, Beta, Dtype, OptimizerName, Reference, Section


def braces(path: str | None) -> Iterator[str]:
    """The problem with a path that has braces."""
    if path and "{" in path:
        yield f"{path}: Snakemake would take the braces for a wildcard; rename the file or folder"


class ModelSource(Section):
    """A local folder, a Hub id, or a function that builds a model."""

    name_or_path: str | None = None
    """Hub id or local folder of a causal language model with safetensors weights and a tokenizer. Give this or `build`.
    """
    revision: str | None = None
    """Commit, tag or branch of a Hub model. The commit that was downloaded is recorded in assets.json."""
    build: Reference | None = None
    """`module:function` or `file.py:function` that writes a model folder; called as `f(folder, seed, **build_options)`.
    """
    build_options: JSON = {}
    """Keyword arguments for `build`."""

    def _problems(self) -> Iterator[str]:
        if (self.name_or_path is None) == (self.build is None):
            yield "give exactly one of name_or_path and build"
        yield from braces(self.name_or_path)

    def in_place_of(self, model: Model) -> Model:
        """The section `model` of a run that starts from this source, in the same number format."""
        source = self.model_dump(include=set(ModelSource.model_fields))
        return model.model_copy(update={**source, "quantization": None})


class Model(ModelSource):
    """The model to train: a local folder, a Hub id, or a function that builds one."""

    dtype: Dtype = "bfloat16"
    """Number format of the weights, in the saved policies and in the sampler. The optimizer keeps float32 master
    weights.
    """
    quantization: Literal["nf4"] | None = None
    """QLoRA: the trainer holds the linear layers in 4 bits (NF4 of bitsandbytes) and trains `update.lora` on them.
    Policy 0 is then the model rounded to these values once, so that the sampler, in `dtype`, has the same weights.
    Required for a checkpoint that is already in NF4; its codes are kept.
    """
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Read that code before you turn this on."""
    train_vision: bool = False
    """Also train the vision encoder of a vision-language model and its projector to the language model. Both are frozen
    by default.
    """


class Source(Section):
    """Source of rows. Set exactly one of `name`, `path` and `generator`."""

    name: str | None = None
    """Hub id of a dataset, or a folder that `datasets.load_dataset` can read."""
    path: str | None = None
    """A .jsonl, .json, .csv, .tsv or .parquet file; a relative path starts at `data_dir` if that is set."""
    generator: Reference | None = None
    """`module:function` or `file.py:function` that returns a list of rows (dicts); called as `f(**options)`."""
    options: JSON = {}
    """Keyword arguments for `generator`."""
    config_name: str | None = None
    """Configuration (subset) of a Hub dataset, for example `main`."""
    split: str = "train"
    """Split of a Hub dataset."""
    revision: str | None = None
    """Commit, tag or branch of a Hub dataset. The commit that was downloaded is recorded in assets.json."""
    max_rows: int | None = Field(None, ge=1)
    """Use only this many rows, from the start."""

    def _problems(self) -> Iterator[str]:
        if sum(source is not None for source in (self.name, self.path, self.generator)) != 1:
            yield "give exactly one of name, path and generator"
        yield from braces(self.path or self.name)


class PromptSelection(Section):
    """Choice of training prompts by pass rate, the share of right completions (`correct`). Held-out prompts stay as
    they are. See docs/difficulty.md.
    """

    pass_rate: tuple[float, float] | None = None
    """Keep training prompts whose pass rate under policy 0 is in this closed range, such as `[0.1, 0.9]`. Default: all
    prompts.
    """
    num_generations: int = Field(8, ge=2)
    """Number of completions of policy 0 per training prompt from which the stage `difficulty` estimates its pass rate.
    That stage runs for `pass_rate` and for `weights: static`.
    """
    weights: Literal["none", "static", "online"] = "none"
    """How prompts are drawn. `none`: each prompt is used once before any is used again. `static`: prompts are drawn
    with weights p(1 − p), where p is the pass rate of policy 0, so that prompts which the policy solves about half of
    the time come most often. `online`: the same, but the scores of earlier rounds count too.
    """

    def _problems(self) -> Iterator[str]:
        if self.pass_rate is None and self.weights == "none":
            yield "does not select anything; set pass_rate or weights, or leave the section out"
        if self.pass_rate is None and self.weights == "online":
            yield from self.unused(
                ("num_generations",), "with weights: online alone; set weights: static, or pass_rate"
            )
        if self.pass_rate is None:
            return
        low, high = self.pass_rate
        if not 0 <= low <= high <= 1:
            yield (
                f"pass_rate: [{low:g}, {high:g}] is not a range of shares; give the lowest and the highest, from 0 to 1"
            )
        if not any(low <= right / self.num_generations <= high for right in range(self.num_generations + 1)):
            yield (
                f"pass_rate: no share of {self.num_generations} completions lies in [{low:g}, {high:g}], so no prompt "
                "would be left; widen the range or raise num_generations"
            )


def check_template(template: str | None) -> str | None:
    """Returns the template if its braces name columns; otherwise raises ValueError."""
    try:
        names = [name for _, name, *_ in Formatter().parse(template or "") if name is not None]
    except ValueError as error:
        raise ValueError(f"not a valid template ({error}); write a literal brace twice") from None
    if any(not name.isidentifier() and not name[:1].isalpha() for name in names):
        raise ValueError("a pair of braces names no column; write literal braces twice: {{}}")
    return template


class Dataset(Section):
    """Training and evaluation prompts, and how a row becomes a prompt."""

    train: Source
    """Training rows."""
    eval: Source
    """Held-out rows. A training row with the same prompt as one of these is dropped. White space at the ends of lines
    makes no difference.
    """
    dev: Source | None = None
    """Held-out rows for model selection. If given, a run measures everything on these rows, and `eval` is used only
    once, to test the policy that `select` chooses. A training row with the same prompt as one of these is dropped, and
    so is one of these that shares its prompt with a row of `eval`.
    """
    prompt_column: str = "prompt"
    """Column with the prompt: a list of messages, to which the chat template is applied, or a string, which is used
    unchanged.
    """
    user_prompt: Annotated[str | None, AfterValidator(check_template)] = None
    """Template that makes a user message from the columns, for example `"{question}\\nAnswer:"`. Replaces
    `prompt_column`. Write a literal brace twice: `'\\boxed{{}}'`.
    """
    image_column: str | None = None
    """Column with the image or list of images of a prompt, such as TRL's `image` and `images`: of type
    `datasets.Image`, or PIL images from a generator. They are placed where the messages have content parts `{type:
    image}`, otherwise at the beginning of the first user message. The model must accept images.
    """
    system_prompt: str | None = None
    """System message before each prompt that has none. A prompt that is a string then becomes a user message."""
    chat_template_kwargs: JSON = {}
    """Variables for the chat template, for example `{enable_thinking: true}`."""
    split_special_tokens: bool | None = None
    """Split special tokens such as `<|im_end|>` that occur in the text of data, tools and environments into ordinary
    tokens (transformers' name), so that such text cannot end a turn. With false, they are encoded as special tokens;
    string prompts to which a chat template was already applied need this. Default: split in messages, refused in
    strings. Special tokens in `system_prompt` and `user_prompt` are always special, except end tokens.
    """
    max_prompt_length: int = Field(512, ge=1)
    """Maximum prompt length in tokens. Longer prompts are dropped; prompts/counts.json says how many."""
    shuffle_dataset: bool = True
    """Draw the prompts of each epoch in random order. With false, rounds take them in the order of the rows, each once
    before any is used again (a refill takes the next rows, which the next round samples too). To train on a curriculum
    or a changing mixture, order the rows accordingly.
    """
    select: PromptSelection | None = None
    """Choice of training prompts by how hard they are for the policy. Default: all prompts, equally often."""

    @property
    def shows_images(self) -> bool:
        """True if prompts have images."""
        return self.image_column is not None

    @property
    def parts(self) -> dict[str, Source]:
        """The sources of rows, by key."""
        sources = {"train": self.train, "dev": self.dev, "eval": self.eval}
        return {name: source for name, source in sources.items() if source is not None}


class Sft(Section):
    """Supervised fine-tuning (SFT) on demonstrations, before RLOO."""

    demonstrations: Source
    """Rows with a prompt, formatted as in `dataset`, and a completion."""
    completion_column: str = "completion"
    """Column with the completion to imitate: text, or a list with one assistant message."""
    steps: int = Field(200, ge=1)
    """Number of optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations per optimizer step."""
    optimizer: OptimizerName = "adamw"
    """As `update.optimizer`."""
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate schedule after the warm-up."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    warmup_steps: int = Field(10, ge=0)
    """Optimizer steps of linear warm-up, fewer than `steps`; as `update.warmup_steps`."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's β₁ and β₂."""
    weight_decay: float = Field(0.0, ge=0)
    """As `update.weight_decay`."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down to it."""
    disable_dropout: bool = True
    """Turn off the dropout that the model's config.json sets."""
    held_out: int = Field(0, ge=0)
    """Demonstrations kept out of training, drawn with the run's seed, so that the checks can report their perplexity.
    Demonstrations of evaluation prompts are always kept out.
    """

    def _problems(self) -> Iterator[str]:
        if self.warmup_steps >= self.steps:
            yield f"warmup_steps ({self.warmup_steps}) leaves none of the {self.steps} steps after it; set fewer"


class Warmstart(Section):
    """Makes policy 0, the starting point of RLOO."""

    sft: Sft | None = None
    """Train on demonstrations first. Without this section the model itself is policy 0."""
