"""The configuration of a run: one pydantic model a section, a docstring under every key; config_file.py reads it.

`STAGES` says which sections each stage gets. A stage is given these alone (`Config.only`), and Snakemake runs it again
when one that decides its result changes, so the two can never disagree.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rloo_pipeline import presets
from rloo_pipeline.errors import did_you_mean

TABLE_COLUMNS = (
    *("prompt_id", "prompt", "prompt_ids", "sample", "completion", "completion_ids", "prompts", "completions"),
    *("sampling_logps", "finish_reason", "seed", "reward", "error"),
)
"""Names that the tables use themselves."""

Dtype = Literal["float32", "bfloat16", "float16"]
JSON = dict[str, Any]


class Section(BaseModel):
    """A section: no unknown keys, no changes after loading, docstrings are the descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


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


class Rollout(Section):
    """Sampling completions with vLLM."""

    num_generations: int = Field(4, ge=2)
    """K, the completions of one prompt; the other K-1 are each one's baseline."""
    generation_batch_size: int = Field(256, ge=2)
    """Completions in a round; a multiple of num_generations."""
    shards: int = Field(1, ge=1)
    """Jobs that a round's sampling and scoring are cut into. Changes no result, but samples again."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample among tokens at least this share as likely as the likeliest one."""
    max_completion_length: int = Field(256, ge=1)
    """Longest completion in tokens; one that reaches it without an end token is truncated."""
    oversample: float = Field(1.0, ge=1)
    """Sample so many times the prompts; the update takes the first ones whose rewards differ, then fills up."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) is not a multiple of num_generations "
                f"({self.num_generations}): every prompt needs all its K completions"
            )
        if self.shards > self.sampled_prompts:
            raise ValueError(f"shards ({self.shards}) exceeds the {self.sampled_prompts} prompts of a round")
        return self

    @property
    def num_prompts(self) -> int:
        """Prompts that a round's update trains on."""
        return self.generation_batch_size // self.num_generations

    @property
    def cut_by(self) -> str | None:
        """The key that cuts the sampling distribution, if one does."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        return next((key for key, on in cuts.items() if on), None)

    @property
    def sampled_prompts(self) -> int:
        """Prompts that a round samples from."""
        return math.ceil(self.num_prompts * self.oversample)


class Vllm(Section):
    """The sampling engine's place on the machine; changes no result beyond rounding, so a change reruns nothing."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes."""
    kv_cache_gib: int = Field(1, ge=1)
    """Key-value cache in GiB where vLLM runs on CPUs."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that hold one model together."""
    threads: int = Field(1, ge=1)
    """CPU threads of one sampling job; fixed here and not by the machine, so that sums round alike everywhere."""


class Reward(Section):
    """One reward function."""

    function: str
    """`module:function` or `file.py:function`, called as TRL calls it."""
    name: str | None = None
    """Column and metric name; the function's own name where not given."""
    weight: float = 1.0
    """Weight in the sum; 0 makes it a monitor that teaches nothing."""
    options: JSON = {}
    """Further keyword arguments of the function."""

    @property
    def column(self) -> str:
        """The name under which scores are stored."""
        return self.name or self.function.rpartition(":")[2]


class KL(Section):
    """The penalty for leaving the reference policy (policy 0); its coefficient is algorithm.beta."""

    placement: Literal["reward", "token_reward", "loss"] = "reward"
    """Where the penalty goes: into each completion's reward before the baseline (the RLOO paper), into each token's
    reward-to-go after the baseline, or into the loss with a gradient of its own (GRPO).
    """
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimates from sampled tokens. In a reward only k1 is unbiased; in the loss k1 has no gradient on
    average.
    """
    bias_correction: bool = False
    """Multiply the penalty in the loss by the ratio (DeepSeek-V3.2; TRL's use_bias_correction_kl)."""
    target: float | None = Field(None, gt=0)
    """KL of a completion in nats that beta is steered to after each round (Ziegler et al. 2019); constant beta where
    not given.
    """
    gain: float = Field(0.1, gt=0)
    """How fast beta is steered: at most a fifth of this share a round."""


class Mismatch(Section):
    """What is done where the sampler (vLLM) and the trainer give a token different log-probs."""

    correction: Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis"] = "none"
    """Importance weights of the trainer over the sampler: truncated (tis) or dropped outside the thresholds (mis), for
    each token or for the whole completion.
    """
    max: float | None = Field(2.0, gt=0)
    """Upper threshold of a weight."""
    min: float | None = Field(None, ge=0)
    """Lower threshold of a weight."""


class ResponseLength(Section):
    """Shaping of the reward by the completion's length in tokens; both penalties may be on."""

    overlong_cache: int | None = Field(None, ge=1)
    """Soft over-long penalty (DAPO): over the last so many tokens before max_completion_length it grows to
    overlong_penalty.
    """
    overlong_penalty: float = Field(1.0, ge=0)
    """What a completion of full length loses."""
    target: int | None = Field(None, ge=1)
    """Length that completions are drawn to."""
    target_penalty: float = Field(1.0, ge=0)
    """What a completion loses for each target's length that it is off its target."""


class Algorithm(Section):
    """Which RLOO: every choice that changes the gradient, under TRL's names where TRL has one (docs/algorithms.md)."""

    preset: str | None = None
    """Values for the keys of this section that are not given: a system's RLOO (paper, trl, openrlhf, verl, nemo_rl,
    skyrl, tunix) or an algorithm (rloo, grpo, dr_grpo, reinforce_pp, …). See docs/algorithms.md.
    """
    advantage: str = "rloo"
    """Advantage estimator: a function in algorithm/advantages.py, or one of your own as `module:function`."""
    normalize_advantages: bool = False
    """Subtract the mean of all advantages of a round and divide by their standard deviation."""
    reward_normalization: Literal["none", "batch", "running"] = "none"
    """Standardize rewards, shaped by length: over the round, or by moments carried on from round to round."""
    reward_clip_range: tuple[float, float] | None = None
    """Clip each completion's weighted reward to this range before KL and baseline."""
    response_length: ResponseLength = ResponseLength()
    """Length as a part of the reward."""
    beta: float = Field(0.05, ge=0)
    """KL coefficient; at 0 the reference model is neither staged nor run."""
    kl: KL = KL()
    """Where and how the KL counts."""
    importance_sampling_level: Literal["sequence", "sequence_mean", "token"] = "sequence"
    """What one action is: the whole completion (RLOO), its length-normalised ratio (GSPO), or a token."""
    old_logps: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probs stand for the policy that sampled: the trainer's own, computed again, or the sampler's."""
    clip: Literal["ppo", "cispo", "none"] = "ppo"
    """PPO's pessimistic clip of the ratio; CISPO's clipped weight without gradient on log-probs; or none: REINFORCE
    without a ratio.
    """
    epsilon: float = Field(0.2, gt=0)
    """Clip range of the ratio below 1, and above it where epsilon_high is not given."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clip range of the ratio above 1 (clip-higher); with CISPO the weight's bound is 1 + epsilon_high."""
    delta: float | None = Field(None, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative; must exceed 1 + epsilon_high."""
    loss_agg_mode: Literal[
        "sequence",
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ] = "sequence"
    """How a step's loss is made of its parts: mean over completions of each one's actions (RLOO), mean over all tokens
    (DAPO), mean over completions of their tokens' mean (GRPO), of their sum, or of that over max_completion_length (Dr.
    GRPO).
    """
    mask_truncated_completions: bool = False
    """Leave completions without an end token out of the loss."""
    keep_truncated_in_baseline: bool = False
    """A masked completion still counts, with KL 0, in its siblings' baseline and in the loss's denominator (TRL); else
    it is as if it were not there.
    """
    filter_zero_variance: bool = False
    """Leave out groups of equal rewards, as if they were not there; see rollout.oversample."""
    mismatch: Mismatch = Mismatch()
    """Sampler against trainer."""
    num_iterations: int = Field(1, ge=1)
    """Passes over a round's completions (mu in the GRPO paper)."""
    steps_per_generation: int = Field(1, ge=1)
    """Optimizer steps in one pass; generation_batch_size is cut into so many mini-batches of whole groups."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        return presets.fill(given) if isinstance(given, dict) else given

    @field_validator("advantage")
    @classmethod
    def _known_estimator(cls, name: str) -> str:
        if ":" not in name and name not in (known := estimators()):
            raise ValueError(f"no estimator '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}")
        return name

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(f"delta ({self.delta:g}) must exceed 1 + epsilon_high ({1 + high:g}), else it clips first")
        if self.delta is not None and self.clip != "ppo":
            raise ValueError(f"delta is a part of clip: ppo, not of clip: {self.clip}")
        if self.kl.placement == "token_reward" and self.importance_sampling_level != "token" and self.clip != "none":
            raise ValueError(
                "kl.placement: token_reward gives each token an advantage of its own, so a token must be an action; "
                "set importance_sampling_level: token (or clip: none)"
            )
        if self.kl.target is not None and self.beta == 0:
            raise ValueError("kl.target steers beta by factors, which cannot leave 0; set beta to its first value")
        if self.kl.bias_correction and (self.kl.placement != "loss" or self.clip == "none"):
            raise ValueError(
                "kl.bias_correction multiplies the KL in the loss by the ratio; it needs kl.placement: loss "
                "and a clip other than none"
            )
        return self._coherent_mismatch()

    def _coherent_mismatch(self) -> Self:
        correction, low, high = self.mismatch.correction, self.mismatch.min, self.mismatch.max
        if correction != "none" and self.old_logps == "sampler":
            raise ValueError(
                f"mismatch.correction: {correction} weighs the trainer's log-probs against the sampler's, and "
                "old_logps: sampler has the ratio do that already; use old_logps: trainer"
            )
        if correction.startswith("token") and self.loss_agg_mode == "sequence" and not self.acts_on_tokens:
            raise ValueError(
                f"mismatch.correction: {correction} weighs tokens, and here a completion is one action; use "
                f"{correction.replace('token', 'sequence')}"
            )
        if low is not None and high is not None and low > high:
            raise ValueError(f"mismatch.min ({low:g}) exceeds mismatch.max ({high:g})")
        if correction.endswith("mis") and low is None and high is None:
            raise ValueError(
                f"mismatch.correction: {correction} drops by thresholds; give mismatch.min or mismatch.max"
            )
        return self

    @property
    def acts_on_tokens(self) -> bool:
        """Whether the loss has a term for each token rather than one for the whole completion."""
        return self.importance_sampling_level == "token" or self.clip != "ppo"


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
    lora: Lora | None = None
    """Train a LoRA adapter instead of all weights."""

    @model_validator(mode="after")
    def _horizon(self) -> Self:
        if self.lr_scheduler_type != "constant" and self.lr_horizon_rounds is None:
            raise ValueError(f"lr_scheduler_type {self.lr_scheduler_type} needs lr_horizon_rounds")
        return self


class Deepspeed(Section):
    """The training engine's place on the machine; a running trainer state keeps its processes and ZeRO stage."""

    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Tokens (prompt and completion) that go through the model at once; bounds memory, changes no result beyond
    rounding.
    """
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: what is split over processes (1 optimizer, 2 and gradients, 3 and weights)."""
    processes: int = Field(1, ge=1)
    """Processes of one update on one machine: one a GPU."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    threads: int = Field(1, ge=1)
    """CPU threads of one process; fixed here and not by the machine, so that sums round alike everywhere."""


class Correct(Section):
    """When a completion counts as right, for accuracy and pass@k. A change evaluates again; the checks stay as they
    are.
    """

    reward: str | None = None
    """Reward function that decides; the first one where not given."""
    threshold: float = 1.0
    """A completion is right when that reward is at least this."""


class Evaluation(Section):
    """Held-out problems, the same prompts and seeds for the warm start and the final policy."""

    num_prompts: int | None = Field(None, ge=1)
    """Held-out prompts, the first so many; all where not given."""
    num_generations: int = Field(1, ge=1)
    """Samples a prompt; pass@k is given for k = 1, 2, 4, … up to it."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_completion_length: int | None = Field(None, ge=1)
    """Longest completion in tokens; the rollouts' where not given."""
    breakdown: list[str] = []
    """Reward functions (of 0 and 1) by which accuracy is given apart: share of completions, accuracy with and
    without.
    """
    bootstrap_samples: int = Field(10000, ge=100)
    """Resamples of the prompts for 95% intervals."""


class Report(Section):
    """The page at the end."""

    title: str | None = None
    """Heading of report.html; the run's name where not given."""
    note: str | None = None
    """A paragraph under the heading."""


class Container(Section):
    """The image that stages run in with `snakemake --sdm apptainer`; without that they run in the local environment."""

    image: str | None = None
    """Path or address of an image; where not given, the one that `make images` builds into images/."""
    binds: list[str] = []
    """Folders that stages see in it besides the working folder, the caches, TMPDIR, and what this configuration
    names.
    """


class Config(Section):
    """One run."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its files lie in results/<run>/."""
    rounds: int = Field(ge=1)
    """Rounds of rollout, score, reference and update. A larger number goes on where a finished run ended."""
    seed: int = Field(0, ge=0)
    """Seed of everything that is drawn."""
    keep_every: int = Field(1, ge=1)
    """Policies kept for good: every n-th, and the last."""
    data_dir: str | None = None
    """Folder that relative dataset paths are looked up in."""
    model: Model
    """The model to train."""
    dataset: Dataset
    """The prompts."""
    warmstart: Warmstart = Warmstart()
    """Policy 0."""
    checks: Checks = Checks()
    """Trial of policy 0."""
    rollout: Rollout = Rollout()
    """Sampling."""
    vllm: Vllm = Vllm()
    """Sampling engine."""
    rewards: list[Reward] = Field(min_length=1)
    """Reward functions."""
    algorithm: Algorithm = Algorithm()
    """RLOO."""
    update: Update = Update()
    """Optimization."""
    deepspeed: Deepspeed = Deepspeed()
    """Training engine."""
    correct: Correct = Correct()
    """Right answers."""
    evaluation: Evaluation = Evaluation()
    """Held-out evaluation."""
    report: Report = Report()
    """Report."""
    container: Container = Container()
    """Image."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        columns = [reward.column for reward in self.rewards]
        if taken := sorted(set(columns) & set(TABLE_COLUMNS)):
            raise ValueError(f"rewards: '{taken[0]}' is a column of the tables; give that function another `name`")
        if len(set(columns)) < len(columns):
            raise ValueError(
                f"rewards: two functions share a name ({', '.join(columns)}); give one a `name` of its own"
            )
        for key, name in [
            ("correct.reward", self.correct.reward),
            *(("evaluation.breakdown", b) for b in self.evaluation.breakdown),
        ]:
            if name is not None and name not in columns:
                raise ValueError(f"{key}: no reward is named '{name}' (there are {', '.join(columns)})")
        if self.rollout.num_prompts % self.algorithm.steps_per_generation:
            raise ValueError(
                f"algorithm.steps_per_generation ({self.algorithm.steps_per_generation}) does not divide the "
                f"{self.rollout.num_prompts} prompts of a round"
            )
        cut, algorithm = self.rollout.cut_by, self.algorithm
        compared = {
            "old_logps: sampler": algorithm.old_logps == "sampler",
            f"mismatch.correction: {algorithm.mismatch.correction}": algorithm.mismatch.correction != "none",
        }
        for key in (key for key, on in compared.items() if cut and on):
            raise ValueError(
                f"algorithm.{key} cannot be used with rollout.{cut}, since the sampler's log-probs are then of the cut "
                "distribution and the trainer's are not; leave one of the two out"
            )
        cache = algorithm.response_length.overlong_cache
        if cache is not None and cache > self.rollout.max_completion_length:
            raise ValueError(
                f"algorithm.response_length.overlong_cache ({cache}) exceeds rollout.max_completion_length "
                f"({self.rollout.max_completion_length})"
            )
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether any update needs log-probs of the reference policy."""
        return self.algorithm.beta != 0

    def only(self, stage: str) -> Self:
        """The part of the configuration that `stage` may read; touching any other section is an AttributeError."""
        part = self.model_copy()
        for section in type(self).model_fields.keys() - {*STAGES[stage].decides, *STAGES[stage].reads}:
            del part.__dict__[section]
        return part

    def params(self, stage: str) -> JSON:
        """What decides the result of `stage`, as plain JSON: when it changes, Snakemake runs the stage again."""
        return self.model_dump(mode="json", include=set(STAGES[stage].decides))


class Sections(NamedTuple):
    """The sections of the configuration that a stage gets."""

    decides: tuple[str, ...]
    """Those that its result depends on."""
    reads: tuple[str, ...] = ()
    """Those that say where and how it runs only, or what it tells people beside its result."""


STAGES: Mapping[str, Sections] = {
    "stage-assets": Sections(("seed", "data_dir", "model", "dataset", "warmstart")),
    "prompts": Sections(("dataset", "model")),
    "warmstart": Sections(("seed", "model", "dataset", "warmstart"), ("deepspeed",)),
    "checks": Sections(("seed", "model", "rollout", "rewards", "checks"), ("correct", "vllm")),
    "rollout": Sections(("seed", "model", "rollout"), ("run", "vllm")),
    "score": Sections(("rewards",)),
    "reference": Sections(("model", "rollout"), ("deepspeed",)),
    "update": Sections(("seed", "model", "rollout", "algorithm", "update", "deepspeed"), ("run",)),
    "evaluate": Sections(("seed", "model", "rollout", "rewards", "correct", "evaluation"), ("run", "vllm")),
    "report": Sections(("run", "rounds", "seed", "rewards", "evaluation", "correct", "report")),
}


def estimator(name: str) -> str:
    """The reference of an advantage estimator: as given, or that of a built-in one."""
    return name if ":" in name else f"rloo_pipeline.algorithm.advantages:{name}"


@cache
def estimators() -> tuple[str, ...]:
    """Names of the built-in advantage estimators, read off their file, since importing it takes torch."""
    file = Path(__file__).parent / "algorithm" / "advantages.py"
    functions = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef))
    marks = {"estimator", "whitened"}
    return tuple(f.name for f in functions if marks & {getattr(mark, "id", None) for mark in f.decorator_list})
