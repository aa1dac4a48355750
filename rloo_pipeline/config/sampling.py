"""Sections `rollout` and `vllm`."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rloo_pipeline.config.generation import GenerationKwargs
from rloo_pipeline.config.section import Reference, Section

FP8 = "fp8"
"""Name of the number format of an engine with quantized weights."""
PYTHON_TOOL = "rloo_pipeline.environments.tools:python"


COLDEST, HOTTEST = 0.01, 2.0
"""Range of vLLM's temperatures: it silently raises a lower one to 0.01, and refuses a higher one."""


def check_temperature(temperature: float) -> float:
    """Returns the temperature if vLLM samples at exactly this value; otherwise raises ValueError."""
    if not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"{temperature:g} is not from {COLDEST:g} to {HOTTEST:g}: vLLM refuses a higher temperature and turns a "
            f"lower one into {COLDEST:g} without an error, so trainer and sampler would differ"
        )
    return temperature


Temperature = Annotated[float, AfterValidator(check_temperature)]


class Rollout(Section):
    """Sampling of the completions that a round trains on, with vLLM."""

    num_generations: int = Field(4, ge=2)
    """K, the number of completions per prompt. The baseline of each one is the mean reward of the other K−1."""
    generation_batch_size: int = Field(256, ge=2)
    """Completions that a round trains on; a multiple of `num_generations`."""
    shards: int = Field(1, ge=1, le=1000)
    """Number of shards into which a round is split, each with its own jobs for sampling and scoring. Completions do not
    depend on it, and the reference's log-probs change only by rounding; but a new value samples again.
    """
    temperature: Temperature = 1.0
    """Sampling temperature, from 0.01 to 2. The trainer's log-probs use the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 turns it off. docs/algorithms.md explains the effect of `top_p`, `top_k` and `min_p` on
    ratio, KL and gradient.
    """
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 turns this off."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample only tokens whose probability is at least `min_p` times that of the most likely token."""
    generation_kwargs: GenerationKwargs | None = None
    """Further parameters of vLLM: stop strings, masks, structured outputs."""
    max_completion_length: int = Field(256, ge=1)
    """Maximum completion length in tokens. A completion that reaches it without an end token is truncated."""
    oversample: float = Field(1.0, ge=1, le=1000)
    """Sample `oversample` times as many prompts as the update needs. The update takes the first groups whose rewards
    differ, and fills up with other groups.
    """
    refill: int = Field(0, ge=0)
    """Maximum number of times that a round samples more prompts to replace groups without a signal, each time at most
    as many as a round has. Needs `algorithm.filter_zero_variance`. See docs/algorithms.md.
    """
    lag: int = Field(0, ge=0)
    """Number of rounds by which sampling lags behind training: round r samples from policy max(0, r − 1 − lag). With 1
    or more, the rollouts of a round run in parallel with the update of the previous round. Losses are then weighted to
    correct for the older policy: unless you set it, `algorithm.mismatch.correction` is `token_mis` with 0.5 and 5
    (IcePop, AReaL) if tokens are actions, and `sequence_tis` with 2 (Yao et al. 2025) if completions are. See
    docs/overlap.md.
    """
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] | None = None
    """Sample rollouts with FP8 weights: the engine quantizes the linear layers as it loads a policy, with vLLM's scheme
    of this name. Evaluations use the original weights. Unless you set `algorithm.mismatch.correction`, losses are
    weighted to correct for the difference (Yao et al. 2025): `token_tis` with 2 if tokens are actions, `sequence_tis`
    with 2 if completions are. Needs a 16-bit `model.dtype`, and a GPU with FP8 for sampling; CPUs support
    `fp8_per_channel`.
    """
    token_budget: int | None = Field(None, ge=1)
    """Maximum number of tokens that a completion grows by in one round (partial rollouts, Kimi k1.5). A completion that
    has not ended by then continues in the next round, under that round's policy. A group is trained on in the round in
    which its last completion ends, so the number of completions per round varies around `generation_batch_size`.
    `algorithm.mismatch.correction` has the same default as with a lag. See docs/overlap.md.
    """
    router_replay: bool = False
    """Train a mixture of experts with the experts that the sampler chose (routing replay): rollouts store the choices,
    and the trainer's router only weights the chosen experts. Needs a GPU for sampling; not with tools or images.
    """
    environment: Reference | dict[str, Reference] | None = None
    """`module:Class` or `file.py:Class` of an environment, by TRL's contract (`environment_factory`): `reset(**row)`
    returns the text that ends the prompt, public methods are tools, `get_reward()` scores the episode. Or a mapping of
    names to such classes; the column `environment` of the data then names one for each row. For other libraries, write
    `openenv:URL`, `openenv:COMMAND` or `verifiers:TASKSET`. See docs/environments.md.
    """
    tools: list[Reference] = []
    """Functions that the model may call, as `module:function` or `file.py:function`, in addition to those of its
    environment. The chat template puts their types and docstrings into the prompt.
    """
    max_tool_calling_iterations: int | None = Field(None, ge=1)
    """Maximum number of turns in an episode whose tool calls are answered. Default: limited only by
    `max_completion_length`.
    """
    max_turns: int | None = Field(None, ge=1)
    """Maximum number of turns that the model takes in an episode. Default: limited only by `max_completion_length`,
    which includes tool answers.
    """
    tool_parser: str = "auto"
    """vLLM's parser of tool calls, such as `hermes`, `qwen3_coder` or `llama3_json`. `auto`: the first of these that
    can read a call as the model's chat template writes it.
    """
    environment_workers: int = Field(64, ge=1)
    """Maximum number of processes for tools and environments: one per open episode of an environment, or per call of a
    function in `tools`. Changes results only by rounding.
    """
    environment_timeout: float = Field(60.0, gt=0)
    """Time limit of a tool call, in seconds; at the limit its process is killed, and the model gets an error as the
    answer.
    """
    environment_sandbox: bool = False
    """Run the processes of tools and environments in the sandbox that `code_reward` uses: without network, with only
    the files of their code and of Python, writing only to /tmp, and with at most `environment_memory_mb`. See
    docs/environments.md.
    """
    environment_memory_mb: int = Field(2048, ge=128)
    """Memory limit of each process in the sandbox, in MiB."""
    environment_image: str | None = None
    """Path of an Apptainer image in which the processes of tools and environments run, with its Python (3.11 or newer)
    and its packages. Default: the Python of the stages.
    """
    environment_python: str | None = None
    """Path of the Python (3.11 or newer) in another virtual environment, with whose packages tools and environments
    run. Default: the Python of the stages.
    """
    environment_read_only: list[str] = []
    """More files and folders that these processes can read in the sandbox or image, at the same absolute paths. Folders
    are added to Python's path.
    """
    environment_gpus: int = Field(0, ge=0)
    """GPUs per job for tools and environments, in addition to those of the engine. Only their processes see these GPUs,
    in CUDA_VISIBLE_DEVICES; with 0 they see none.
    """

    def _problems(self) -> Iterator[str]:
        if self.environment == {}:
            yield "environment: a mapping without a name; name an environment, or leave the key out"
        if len(set(self.tools)) < len(self.tools):
            yield f"tools: two are the same ({', '.join(self.tools)}); name each once"
        if not self.uses_tools:
            of_processes = (key for key in type(self).model_fields if key.startswith("environment_"))
            keys = ("max_turns", "max_tool_calling_iterations", "tool_parser", *of_processes)
            yield from self.unused(keys, "without tools; set tools or environment")
        if self.environment_sandbox and any(name.startswith("openenv:") for name in self.environments.values()):
            yield (
                "environment_sandbox: the sandbox has no network, which episodes need to reach OpenEnv's server; "
                "leave out this key"
            )
        if self.environment_sandbox and PYTHON_TOOL in self.tools:
            yield (
                f"tools: {PYTHON_TOOL} runs each program in a sandbox of its own, which cannot start in that of "
                "environment_sandbox; leave one of the two out"
            )
        if not (self.environment_sandbox or self.environment_image):
            yield from self.unused(
                ("environment_read_only",),
                "without a sandbox or an image; set environment_sandbox or environment_image",
            )
        if self.token_budget is not None and self.token_budget >= self.max_completion_length:
            yield (
                f"token_budget ({self.token_budget}) cuts no completion of at most {self.max_completion_length} tokens "
                "(max_completion_length); lower it, or leave it out"
            )
        if self.generation_batch_size % self.num_generations:
            yield (
                f"generation_batch_size ({self.generation_batch_size}) is not a multiple of num_generations "
                f"({self.num_generations}); every prompt needs K completions, so change one of the two"
            )
        if self.shards > self.sampled_prompts:
            yield f"shards ({self.shards}) exceeds the {self.sampled_prompts} prompts of a round; lower it"

    @property
    def uses_tools(self) -> bool:
        """True if the model can call tools, so that a completion may have several turns."""
        return bool(self.tools) or self.environment is not None

    @property
    def environments(self) -> dict[str | None, str]:
        """Environments by the name that rows use: name → import string. A single environment has the name None."""
        if isinstance(self.environment, dict):
            return dict(self.environment.items())
        return {} if self.environment is None else {None: self.environment}

    @property
    def num_prompts(self) -> int:
        """Number of prompts that a round's update trains on."""
        return self.generation_batch_size // self.num_generations

    @property
    def tables(self) -> int:
        """Number of rollout tables in a round: one for each shard, plus the refill's."""
        return self.shards + bool(self.refill)

    def lag_of(self, round_: int) -> int:
        """Rounds by which sampling of round `round_` (from 1) lags behind its update: fewer than `lag` in the first
        rounds, which sample from policy 0.
        """
        return min(self.lag, round_ - 1)

    def policy_of(self, round_: int) -> int:
        """Number of the policy that samples round `round_` (from 1)."""
        return round_ - 1 - self.lag_of(round_)

    @property
    def cut_by(self) -> str | None:
        """The key that truncates the sampling distribution, if any."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": bool(self.min_p)}
        return next((key for key, on in cuts.items() if on), None)

    @property
    def masked_by(self) -> str | None:
        """The key of `generation_kwargs` that masks tokens in rollouts and evaluations, if any."""
        return None if self.generation_kwargs is None else self.generation_kwargs.masked_by

    @property
    def sampled_prompts(self) -> int:
        """Number of prompts that a round samples completions for. Rounding errors must not add one: 1.1 times 50
        prompts are 55.
        """
        return math.ceil(self.num_prompts * Fraction(str(self.oversample)))


class Vllm(Section):
    """Resources of the sampling engine (vLLM). They change results only by rounding, so a new value reruns nothing."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of a GPU's memory that vLLM may use at most. Within it, the KV cache is sized for a full batch of the
    longest sequences.
    """
    kv_cache_gib: int = Field(1, ge=1)
    """Maximum size of the KV cache in GiB when vLLM runs on CPUs. vLLM allocates what 256 concurrent sequences need, up
    to this size.
    """
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that one copy of the model is split over."""
    decode_context_parallel_size: int = Field(1, ge=1)
    """Number of these GPUs over which vLLM splits the KV cache of each sequence. Useful if the model has fewer
    key-value heads than GPUs, since the cache would otherwise be duplicated. Must divide `tensor_parallel_size`.
    """
    data_parallel_size: int = Field(1, ge=1)
    """Number of engines in a sampling job, each with a copy of the model on `tensor_parallel_size` GPUs, for clusters
    that allocate whole nodes. On one machine, and with `rloo submit`, `rollout.shards` does the same. Not with tools.
    """
    threads: int = Field(1, ge=1)
    """CPU threads per engine. A fixed number, independent of the machine, so that sums round the same everywhere."""

    def _problems(self) -> Iterator[str]:
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            yield (
                f"decode_context_parallel_size ({self.decode_context_parallel_size}) does not divide "
                f"tensor_parallel_size ({self.tensor_parallel_size})"
            )

    @property
    def gpus(self) -> int:
        """GPUs of the engines of a job."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def job_threads(self) -> int:
        """CPU threads of the engines of a job."""
        return self.threads * self.data_parallel_size
