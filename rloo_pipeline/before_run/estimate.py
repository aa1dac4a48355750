"""An estimate of what a run needs: jobs, tokens, disk, GPU-hours, and whether its stages fit on a GPU.

Job counts are exact. Tokens are upper bounds, since completions may be shorter. Hours are an order of magnitude under
the assumptions in `ASSUMED`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.before_run import advice, memory
from rloo_pipeline.before_run.memory import GB
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_jobs import all_jobs
from rloo_pipeline.config.run_set import RunSet, jobs_by_group
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.engine_size import VisibleGpu


class Card(NamedTuple):
    """A GPU."""

    name: str
    gigabytes: float
    teraflops: float
    """Dense bfloat16 from the vendor's data sheet; float16 for cards without bfloat16."""
    bandwidth: float
    """Memory bandwidth in TB/s."""

    @property
    def gpu(self) -> VisibleGpu:
        """The GPU as vLLM sees it."""
        return VisibleGpu(self.gigabytes * GB, self.name)


CARDS = {
    card.name: card
    for card in (
        Card("v100", 32, 125, 0.9),
        Card("t4", 16, 65, 0.32),
        Card("rtx3090", 24, 71, 0.94),
        Card("rtx4090", 24, 165, 1.01),
        Card("a40", 48, 150, 0.7),
        Card("l40s", 48, 362, 0.86),
        Card("a100", 80, 312, 2.0),
        Card("h100", 80, 989, 3.35),
        Card("h200", 141, 989, 4.8),
        Card("b200", 180, 2250, 8.0),
    )
}
MFU, DECODING = 0.3, 0.5
"""Share of peak compute that training reaches, and share of peak bandwidth that decoding reaches."""
BATCH = 256
"""Maximum number of sequences that vLLM decodes at once."""
STARTS = {"rollout": 90.0, "reference": 40.0, "teacher": 40.0, "update": 60.0}
"""Seconds that a job takes to start."""
ASSUMED = (
    f"every completion at its maximum length; training at {MFU:.0%} of the card's peak in 16 bits, decoding at "
    f"{DECODING:.0%} of its bandwidth with up to {BATCH} sequences at once; start-up of "
    + ", ".join(f"{seconds:.0f} s per {stage}" for stage, seconds in STARTS.items())
)
TABLE_BYTES = 30.0
"""Compressed bytes per token in a round's tables: ids, log-probs and text."""


class Fit(NamedTuple):
    """The result of fitting a stage on a card."""

    stage: str
    terms: memory.Terms
    fits: bool
    advice: str = ""
    """Nearest setting that would fit, if this one does not."""


def card_of(argument: str) -> Card:
    """Parses a card such as `h100` or `h100:80`, with its memory in GB.

    Raises:
        UserError: the card is unknown, or its memory is not a number above 0.
    """
    name, _, size = argument.lower().partition(":")
    if name not in CARDS:
        raise UserError(f"--cluster-gpu {argument}: unknown card; name one of {', '.join(CARDS)}, such as h100:80 (GB)")
    if not size:
        return CARDS[name]
    if not re.fullmatch(r"\d+(\.\d+)?", size) or not float(size):
        raise UserError(f"--cluster-gpu {argument}: '{size}' is not a number of GB; write it as h100:80")
    return CARDS[name]._replace(gigabytes=float(size))


def jobs(config: Config) -> dict[str, int]:
    """Number of jobs of each stage in a run from the beginning."""
    return Counter(job.stage.replace("_", "-") for job in all_jobs(config))


def jobs_saved(runs: RunSet) -> int:
    """Jobs that an experiment does not run because its runs share their files."""
    return round(_saved(runs, lambda group, config: len(jobs_by_group(config)[group])))


def _saved(runs: RunSet, cost: Callable[[str, Config], float]) -> float:
    """Saving by sharing: `cost` of all runs' groups of files, minus the cost of the groups that are made."""
    per_run = sum(cost(group, config) for run, config in runs.configs.items() for group in runs.homes[run])
    groups = {home: group for homes in runs.homes.values() for group, home in homes.items()}
    return per_run - sum(cost(groups[home], config) for home, config in runs.shared.items())


def tokens(config: Config) -> dict[str, float]:
    """Upper bounds of completions and tokens."""
    samples = config.rollout.sampled_prompts * config.rollout.num_generations
    completion, prompt = config.rollout.max_completion_length, config.dataset.max_prompt_length
    refills = {"completion tokens of refills": config.rollout.refill * samples * completion * config.rounds}
    return {
        "completions per round": samples,
        "completion tokens per round": samples * completion,
        "completions": samples * config.rounds,
        "completion tokens": samples * completion * config.rounds,
        **(refills if config.rollout.refill else {}),
        "trained tokens": config.rollout.generation_batch_size * (prompt + completion) * config.rounds,
    }


def of_difficulty(config: Config, prompts: int) -> Config:
    """A run of one round that samples as much as the stage `difficulty` does of this many prompts."""
    samples = config.dataset.select.num_generations if config.dataset.select else 0
    sizes = {"rollout.num_generations": samples, "rollout.generation_batch_size": prompts * samples}
    return advice.override(config, {**sizes, "rollout.oversample": 1.0}).model_copy(update={"rounds": 1})


def tokens_saved(runs: RunSet, prompts: int) -> float:
    """Completion tokens that an experiment does not sample because its runs share their files.

    Args:
        runs: the experiment's runs.
        prompts: training prompts that `difficulty` samples.
    """

    def of_group(group: str, config: Config) -> float:
        per_round = tokens(config)["completion tokens per round"]
        difficulty = tokens(of_difficulty(config, prompts))["completion tokens"] if group == "difficulty" else 0.0
        return per_round if group == "rollout" else difficulty

    return _saved(runs, of_group)


def disk(config: Config, shape: ModelDims) -> dict[str, float]:
    """Bytes on disk when the run is done, and temporary ones."""
    size, learned = BYTES[config.model.dtype], memory.trained(config, shape)
    policy = shape.parameters * size if config.update.lora is None else learned * size
    lag, rounds = config.rollout.lag, range(1, config.rounds + 1)
    policies = sum(number % config.keep_every == 0 or number >= config.rounds - lag for number in rounds)
    # the optimizer's state, a float32 master weight if DeepSpeed keeps one, and weights if it cannot use the policy's
    weights = size if config.update.lora is not None or config.deepspeed.zero_stage == 3 else 0
    master = 4 if size == 2 or config.deepspeed.zero_stage else 0
    trainer = memory.moments(config, shape) + learned * (master + weights)
    linked = policy if config.keep_every > 1 else 0  # a state holds on to its policy
    counts = tokens(config)
    tables = (counts["completion tokens"] + counts["completions"] * config.dataset.max_prompt_length) * TABLE_BYTES
    tables *= 1 + config.rollout.refill
    return {
        f"policies ({policies} and policy 0)": shape.parameters * size + policies * policy,
        "trainer state": trainer,
        "the next policy and trainer state (temporary)": policy * (1 + lag) + linked + trainer,
        "tables of rounds": tables,
    }


def _scorers(config: Config, shape: ModelDims, teacher: ModelDims | None) -> dict[str, ModelDims]:
    """The models of stages that compute log-probs of a round, by stage."""
    reference = {"reference": shape} if config.uses_reference else {}
    return reference | ({} if teacher is None else {"teacher": teacher})


def fits(config: Config, shape: ModelDims, card: Card, teacher: ModelDims | None = None) -> Iterator[Fit]:
    """Checks if each stage that uses a GPU fits on the card; `teacher` has the dimensions of the run's teacher."""
    room = card.gigabytes * GB * memory.ROOM
    terms = memory.update(config, shape, "cuda")
    fit = memory.total(terms) <= room
    yield Fit("update", terms, fit, "" if fit else advice.nearest_update(config, shape, room))
    for stage, dims in _scorers(config, shape, teacher).items():
        terms = memory.reference(config, dims, "cuda")
        fit = memory.total(terms) <= room
        smaller = "lower deepspeed.max_tokens_per_micro_batch, or use a card with more memory"
        yield Fit(stage, terms, fit, "" if fit else smaller)
    terms = memory.rollout(config, shape, card.gpu)
    fit = memory.concurrent_sequences(config, shape, terms) >= 1
    yield Fit("rollout", terms, fit, "" if fit else advice.nearest_rollout(config, shape, card.gpu))


def minutes(seconds: float) -> str:
    """5400 → 1 h 30 min."""
    whole = round(seconds / 60)
    return f"{whole // 60:,} h {whole % 60:02d} min" if whole >= 60 else f"{whole} min" if whole else f"{seconds:.0f} s"


def sampler_gpus(config: Config) -> int:
    """GPUs of a job that samples: those of its engine and of its environments."""
    return config.vllm.tensor_parallel_size + config.rollout.environment_gpus


def hours(config: Config, shape: ModelDims, card: Card, teacher: ModelDims | None = None) -> dict[str, float]:
    """GPU-hours of each stage over all rounds, under `ASSUMED`; `teacher` as in `fits`."""
    counts, size = tokens(config), BYTES[config.model.dtype]
    shards, parallel, processes = config.rollout.shards, config.vllm.tensor_parallel_size, config.deepspeed.processes
    flops = card.teraflops * 1e12 * MFU
    forward = 2.0 * shape.parameters * counts["trained tokens"]
    passes = 3 * config.algorithm.num_iterations * (4 / 3 if config.deepspeed.gradient_checkpointing is True else 1)
    passes += config.algorithm.needs_old_pass
    cache = memory.rollout(config, shape, card.gpu)
    batch = max(
        1.0, min(BATCH, counts["completions per round"] / shards, memory.concurrent_sequences(config, shape, cache))
    )
    context = config.dataset.max_prompt_length + config.rollout.max_completion_length / 2
    read_per_step = shape.parameters * size + batch * context * shape.cached(config.model.dtype)
    seconds = {
        "rollout": counts["completion tokens"] / batch * read_per_step / (card.bandwidth * 1e12 * DECODING)
        + STARTS["rollout"] * shards * config.rounds * parallel,
        "update": forward * passes / flops + STARTS["update"] * config.rounds * processes,
    }
    seconds["rollout"] *= sampler_gpus(config) / parallel
    scored = counts["completions"] * config.dataset.max_prompt_length + counts["completion tokens"]
    for stage, dims in _scorers(config, shape, teacher).items():
        seconds[stage] = 2.0 * dims.parameters * scored / flops
        seconds[stage] += STARTS[stage] * shards * config.rounds * config.deepspeed.forward_processes
    return {stage: value / 3600 for stage, value in seconds.items()}
