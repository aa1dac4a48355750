"""Sections on sampling: the rollouts, the engine, held-out evaluation."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.config.section import JSON, Section


def sampled_at(temperature: float) -> float:
    """The temperature, which vLLM must take as it is."""
    if not 0.01 <= temperature <= 2:
        raise ValueError(
            f"vLLM samples at temperatures from 0.01 to 2; below it takes 0.01 without an error, and the trainer's "
            f"log-probs would be of {temperature:g}; give one in between"
        )
    return temperature


class Rollout(Section):
    """Sampling completions with vLLM."""

    num_generations: int = Field(4, ge=2)
    """K, the completions of one prompt; the other K-1 are each one's baseline."""
    generation_batch_size: int = Field(256, ge=2)
    """Completions in a round; a multiple of num_generations."""
    shards: int = Field(1, ge=1)
    """Jobs that a round's sampling and scoring are cut into. Changes no result, but samples again."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature, from 0.01 to 2; the trainer's log-probs use the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off. What this, top_k and min_p do to ratio, KL and gradient is in docs/algorithms.md."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample among tokens at least this share as likely as the likeliest one."""
    max_completion_length: int = Field(256, ge=1)
    """Longest completion in tokens; one that reaches it without an end token is truncated."""
    oversample: float = Field(1.0, ge=1)
    """Sample so many times the prompts; the update takes the first ones that teach, then fills up."""

    @field_validator("temperature")
    @classmethod
    def _as_vllm_samples(cls, value: float) -> float:
        return sampled_at(value)

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
    """Largest key-value cache in GiB where vLLM runs on CPUs; it takes what 256 sequences at once need."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that hold one model together."""
    threads: int = Field(1, ge=1)
    """CPU threads of one sampling job; fixed here and not by the machine, so that sums round alike everywhere."""


class Correct(Section):
    """When a completion counts as right, for accuracy and pass@k. A change evaluates again; the checks stay as they
    are.
    """

    reward: str | None = None
    """Reward function that decides; the first one where not given."""
    threshold: float = 1.0
    """A completion is right when that reward is at least this."""


class Harness(Section):
    """Benchmarks by the library lm-eval, through its vLLM backend, on the policies that are evaluated."""

    tasks: list[str | JSON] = Field(min_length=1)
    """Tasks by lm-eval's names; or mappings with `task` and what to change of it, such as `dataset_path: json` and
    `dataset_kwargs` for a local file.
    """
    num_fewshot: int | None = Field(None, ge=0)
    """Worked examples before each problem; as the task has it where not given."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many problems of each task."""
    apply_chat_template: bool = False
    """Ask as a user would, through the model's chat template, examples as earlier turns."""
    gen_kwargs: JSON = {}
    """Changes to how a task samples, such as `{max_gen_toks: 1024}`."""
    include_path: str | None = None
    """Folder with task files of your own."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt and answer together in tokens; the model's context where not given."""


class Evaluation(Section):
    """Held-out problems, the same prompts and seeds for the warm start, the final policy and those in between."""

    num_prompts: int | None = Field(None, ge=1)
    """Held-out prompts, the first so many; all where not given."""
    num_generations: int = Field(1, ge=1)
    """Samples a prompt; pass@k is given for k = 1, 2, 4, … up to it."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature, from 0.01 to 2; 0 is greedy."""
    greedy: bool = True
    """Ask once more without chance, one completion a prompt, beside the sampled ones."""
    every: int | None = Field(None, ge=1)
    """Evaluate the policy of every n-th round too; a multiple of keep_every."""
    harness: Harness | None = None
    """Benchmarks of lm-eval beside the held-out prompts."""
    max_completion_length: int | None = Field(None, ge=1)
    """Longest completion in tokens; the rollouts' where not given."""
    breakdown: list[str] = []
    """Reward functions (of 0 and 1) by which accuracy is given apart: share of completions, accuracy with and
    without.
    """
    bootstrap_samples: int = Field(10000, ge=100)
    """Resamples of the prompts for 95% intervals of means, and of random signs for p-values that are not exact."""

    @field_validator("temperature")
    @classmethod
    def _as_vllm_samples(cls, value: float) -> float:
        return value if value == 0 else sampled_at(value)
