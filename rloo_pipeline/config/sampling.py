"""Sections `rollout`, `vllm`, `correct` and `evaluation`."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.config.section import JSON, Section


def check_temperature(temperature: float) -> float:
    """Returns the temperature if vLLM samples at exactly this value, else raises ValueError."""
    if not 0.01 <= temperature <= 2:
        raise ValueError(
            f"vLLM samples at temperatures from 0.01 to 2, and turns a lower one into 0.01 without an error, so the "
            f"trainer's log-probs would be those of another temperature ({temperature:g}); set one from 0.01 to 2"
        )
    return temperature


class Rollout(Section):
    """Sampling of the completions that a round trains on, with vLLM."""

    num_generations: int = Field(4, ge=2)
    """K, the number of completions per prompt. The baseline of each one is the mean reward of the other K−1."""
    generation_batch_size: int = Field(256, ge=2)
    """Completions that a round trains on; a multiple of `num_generations`."""
    shards: int = Field(1, ge=1, le=1000)
    """Number of shards into which a round is split, each with its own jobs for sampling and scoring. Changes no result,
    but a new value samples again.
    """
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature, from 0.01 to 2. The trainer's log-probs use the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 turns it off. docs/algorithms.md explains the effect of `top_p`, `top_k` and `min_p` on
    ratio, KL and gradient.
    """
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 turns this off."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample only tokens whose probability is at least `min_p` times that of the most likely token."""
    max_completion_length: int = Field(256, ge=1)
    """Maximum completion length in tokens. A completion that reaches it without an end token is truncated."""
    oversample: float = Field(1.0, ge=1)
    """Sample `oversample` times as many prompts as the update needs. The update takes the first groups whose rewards
    differ, then fills up with others.
    """

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        return check_temperature(temperature)

    @model_validator(mode="after")
    def _check_groups_and_shards(self) -> Self:
        if self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) is not a multiple of num_generations "
                f"({self.num_generations}); every prompt needs K completions, so change one of the two"
            )
        if self.shards > self.sampled_prompts:
            raise ValueError(f"shards ({self.shards}) exceeds the {self.sampled_prompts} prompts of a round; lower it")
        return self

    @property
    def num_prompts(self) -> int:
        """Number of prompts that the update of a round trains on."""
        return self.generation_batch_size // self.num_generations

    @property
    def cut_by(self) -> str | None:
        """The key that truncates the sampling distribution, if any."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        return next((key for key, on in cuts.items() if on), None)

    @property
    def sampled_prompts(self) -> int:
        """Number of prompts that a round samples completions for."""
        return math.ceil(self.num_prompts * self.oversample)


class Vllm(Section):
    """Resources of the sampling engine (vLLM). They change results only by rounding, so a new value reruns nothing."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM reserves."""
    kv_cache_gib: int = Field(1, ge=1)
    """Maximum size of the KV cache in GiB when vLLM runs on CPUs. vLLM allocates what 256 concurrent sequences need, up
    to this size.
    """
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs over which one copy of the model is split."""
    threads: int = Field(1, ge=1)
    """CPU threads per sampling job. A fixed number, independent of the machine, so that sums round the same everywhere.
    """


class Correct(Section):
    """Definition of a right completion, for accuracy and pass@k. A change reruns the evaluations but not the checks."""

    reward: str | None = None
    """Name of the reward that decides. Default: the first one in `rewards`."""
    threshold: float = 1.0
    """A completion is right if that reward is at least this value."""


class Harness(Section):
    """Benchmarks of the lm-eval library, run through its vLLM backend on every evaluated policy."""

    tasks: list[str | JSON] = Field(min_length=1)
    """Names of lm-eval tasks; or mappings with `task` and the settings to override, for example `dataset_path: json`
    and `dataset_kwargs` for a local file.
    """
    num_fewshot: int | None = Field(None, ge=0)
    """Number of worked examples before each problem. Default: that of the task."""
    limit: int | None = Field(None, ge=1)
    """Evaluate only this many problems of each task, from the start."""
    apply_chat_template: bool = False
    """Format prompts with the model's chat template, with the worked examples as earlier turns."""
    gen_kwargs: JSON = {}
    """Overrides of the task's generation settings, for example `{max_gen_toks: 1024}`."""
    include_path: str | None = None
    """Folder with your own lm-eval task files."""
    max_model_len: int | None = Field(None, ge=1)
    """Maximum length of prompt and answer together, in tokens. Default: the context length of the model."""


class Evaluation(Section):
    """Evaluation on the held-out prompts. All evaluated policies get the same prompts and seeds."""

    num_prompts: int | None = Field(None, ge=1)
    """Number of held-out prompts, from the start. Default: all."""
    num_generations: int = Field(1, ge=1)
    """Completions per prompt. pass@k is reported for k = 1, 2, 4, … up to this number."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature, from 0.01 to 2; 0 decodes greedily."""
    greedy: bool = True
    """Also generate one greedy completion per prompt."""
    every: int | None = Field(None, ge=1)
    """Also evaluate the policy of every n-th round; a multiple of `keep_every`. Default: only the warm start and the
    final policy.
    """
    harness: Harness | None = None
    """lm-eval benchmarks, in addition to the held-out prompts. Off by default."""
    max_completion_length: int | None = Field(None, ge=1)
    """Maximum completion length in tokens. Default: `rollout.max_completion_length`."""
    breakdown: list[str] = []
    """Names of rewards (0 or 1) by which accuracy is broken down: the fraction of completions with 1, and the accuracy
    of those with 1 and of those with 0.
    """
    bootstrap_samples: int = Field(10000, ge=100)
    """Bootstrap resamples of the prompts for the 95% confidence intervals, and random sign flips for p-values that are
    not computed exactly.
    """

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        return temperature if temperature == 0 else check_temperature(temperature)
