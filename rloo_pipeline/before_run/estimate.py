"""Estimates the jobs, tokens, disk and GPU-hours of a run, and checks whether its stages fit on a GPU.

Job counts are exact. Tokens are upper bounds, since completions may be shorter. Hours are an order of magnitude under
the assumptions in `ASSUMED`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.before_run import advice, checkpointing, dataset_inputs, memory, model_inputs, speeds
from rloo_pipeline.before_run.cards import Card
from rloo_pipeline.before_run.memory import GB, RunMemory
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_jobs import all_jobs
from rloo_pipeline.config.run_set import RunSet, jobs_by_group
from rloo_pipeline.rollout.engine_arguments import VisibleGpu

ASSUMED = (
    f"every completion at its maximum length; training at {speeds.TRAINING.typical:.0%} of the card's peak "
    f"({speeds.TRAINING.slow:.0%} to {speeds.TRAINING.fast:.0%}), decoding at {speeds.DECODING.typical:.0%} of its "
    f"bandwidth ({speeds.DECODING.slow:.0%} to {speeds.DECODING.fast:.0%}), as measured on one {speeds.CARD}; N GPUs "
    "are N times as fast (not measured, and neither was offload)"
)
TABLE_BYTES = 30.0
"""Compressed bytes per token in the tables of a round: ids, log-probs and text."""

FILES_OF_JOB, FILES_OF_POLICY = 6, 8
"""Files per job, with its log and Snakemake's records (5.8 to 6.9 in 25 runs), and of a policy besides its weights."""
BYTES_OF_FILE = 5e8
"""Bytes of a policy's weight file."""


class Fit(NamedTuple):
    """The memory of a stage on a card, and whether it fits."""

    stage: str
    terms: memory.Terms
    fits: bool
    advise: Callable[[], str]
    """Names a setting with which the stage would fit."""


def _gpu(card: Card) -> VisibleGpu:
    """The GPU as vLLM sees it."""
    return VisibleGpu(card.gigabytes * GB, card.name)


def jobs(config: Config) -> dict[str, int]:
    """Number of jobs of each stage in a whole run."""
    return Counter(job.stage.replace("_", "-") for job in all_jobs(config))


def jobs_saved(runs: RunSet) -> int:
    """Number of jobs that an experiment saves because its runs share files."""
    return round(_saved(runs, lambda group, config: len(jobs_by_group(config)[group])))


def _saved(runs: RunSet, cost: Callable[[str, Config], float]) -> float:
    """The cost that sharing saves: `cost` summed over the file groups of all runs, minus that of the groups actually
    made.
    """
    per_run = sum(cost(group, config) for run, config in runs.configs.items() for group in runs.homes[run])
    groups = {home: group for homes in runs.homes.values() for group, home in homes.items()}
    return per_run - sum(cost(groups[home], config) for home, config in runs.shared.items())


def tokens(config: Config) -> dict[str, float]:
    """Upper bounds on completions and tokens."""
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
    """A one-round run that samples as much as the stage `difficulty` does for this many prompts."""
    samples = config.dataset.select.num_generations if config.dataset.select else 0
    sizes = {"rollout.num_generations": samples, "rollout.generation_batch_size": prompts * samples}
    return config.override({**sizes, "rollout.oversample": 1.0, "rounds": 1})


def tokens_saved(runs: RunSet, prompts: int) -> float:
    """Number of completion tokens that an experiment saves because its runs share files.

    Args:
        runs: the experiment's runs.
        prompts: number of training prompts that `difficulty` samples.
    """

    def of_group(group: str, config: Config) -> float:
        per_round = tokens(config)["completion tokens per round"]
        difficulty = tokens(of_difficulty(config, prompts))["completion tokens"] if group == "difficulty" else 0.0
        return per_round if group == "rollout" else difficulty

    return _saved(runs, of_group)


def disk(run: RunMemory) -> dict[str, float]:
    """Bytes on disk: what remains when the run is done, and what is temporary."""
    config = run.config
    size, policy, lag = BYTES[config.model.dtype], run.policy, config.rollout.lag
    policies = sum(map(config.keeps, range(1, config.rounds + 1)))
    # optimizer state, float32 master weights if DeepSpeed keeps them, and weights if it cannot use the policy's
    weights = size if config.update.lora is not None or config.deepspeed.zero_stage == 3 else 0
    master = 4 if size == 2 or config.deepspeed.zero_stage else 0
    trainer = run.moments + run.trained * (master + weights)
    linked = policy if config.keep_every > 1 else 0  # a trainer state keeps its policy
    states = 1 + (lag if config.node_folder else 0)
    counts = tokens(config)
    tables = (counts["completion tokens"] + counts["completions"] * config.dataset.max_prompt_length) * TABLE_BYTES
    tables *= 1 + config.rollout.refill
    return {
        f"policies ({policies} and policy 0)": run.shape.parameters * size + policies * policy,
        "trainer state": trainer,
        "the next policy and trainer state (temporary)": policy * (1 + lag) + (linked + trainer) * states,
        "tables of rounds": tables,
    }


def files(run: RunMemory) -> int:
    """Approximate number of files that a run leaves. File systems of clusters often limit it."""
    policies = 1 + sum(map(run.config.keeps, range(1, run.config.rounds + 1)))
    of_policy = FILES_OF_POLICY + math.ceil(run.policy / BYTES_OF_FILE)
    return FILES_OF_JOB * sum(jobs(run.config).values()) + of_policy * policies


class RewardModelCost(NamedTuple):
    """Memory and GPU-hours of the stage `reward_model`, which trains once, before the rounds."""

    terms: memory.Terms
    """Memory of one process."""
    tokens: float | None
    """Maximum number of tokens that it trains on; None if the preferences are not on this machine yet."""
    hours: float | None
    """GPU-hours; None without a card or without `tokens`."""
    problem: str
    """Why it does not fit on the card; empty if it fits, or on CPUs."""


class GpuEstimate(NamedTuple):
    """An estimate for a run on one kind of card."""

    config: Config
    shape: ModelDims
    card: Card
    teacher: ModelDims | None = None
    """Dimensions of the teacher, if any."""

    @property
    def memory(self) -> RunMemory:
        """The memory that its stages take on a card."""
        return RunMemory(self.config, self.shape)

    @property
    def _scorers(self) -> dict[str, ModelDims]:
        """The models of the stages that compute log-probs of a round, by stage."""
        reference = {"reference": self.shape} if self.config.uses_reference else {}
        return reference | ({} if self.teacher is None else {"teacher": self.teacher})

    @property
    def _passes(self) -> float:
        """Cost of a round's update in units of forward passes: forward, gradients of activations, gradients of weights.

        With an adapter, base weights get no gradients. Recomputing activations is one more forward pass.
        """
        config = self.config
        each = (3 if config.update.lora is None else 2) + config.deepspeed.recomputes
        return config.algorithm.num_iterations * each + config.algorithm.needs_old_pass

    @property
    def _packed_tokens(self) -> float:
        """Number of tokens that a round trains on."""
        return self.config.rollout.generation_batch_size * memory.packed_length(self.config)

    def _attention(self, dims: ModelDims, completions: float) -> float:
        """FLOPs of attention in a forward pass over completions; each token attends to all earlier ones."""
        return 2.0 * completions * dims.layers * dims.heads * self.config.longest_sequence**2

    def fits(self) -> Iterator[Fit]:
        """Checks whether each GPU stage fits on the card."""
        config, shape, gpu = self.config, self.shape, _gpu(self.card)
        room = self.card.room * memory.ROOM
        terms = self.memory.update()
        fits = memory.total(terms) <= room
        yield Fit("update", terms, fits, partial(advice.nearest_update, config, shape, room))
        smaller = "lower deepspeed.max_tokens_per_micro_batch, or use a card with more memory"
        for stage, dims in self._scorers.items():
            terms = RunMemory(config, dims).reference()
            yield Fit(stage, terms, memory.total(terms) <= room, lambda: smaller)
        terms = self.memory.rollout(gpu)
        fits = self.memory.concurrent_sequences(terms) >= 1
        yield Fit("rollout", terms, fits, partial(advice.nearest_rollout, config, shape, gpu))

    @property
    def problem(self) -> str:
        """Names the first stage that does not fit, with its memory and the available memory; empty if all fit."""
        fit = next((fit for fit in self.fits() if not fit.fits), None)
        if fit is None:
            return ""
        if fit.stage == "rollout":
            weights = fit.terms["weights"] / GB
            return f"a sampler's weights take {weights:,.0f} GB per GPU and leave no room for a sequence"
        used, room = memory.total(fit.terms) / GB, self.card.room * memory.ROOM / GB
        return f"{fit.stage} takes {used:,.0f} GB per GPU, but only {room:,.0f} GB can be used"

    def hours(self, pace: str = "typical", warm: bool = True) -> dict[str, float]:
        """GPU-hours of each stage over all rounds, under `ASSUMED`.

        Args:
            pace: one of `speeds.PACES`.
            warm: True if engines stay loaded between rounds; False if each stage is a job that starts its own engine.
        """
        config, shape, counts = self.config, self.shape, tokens(self.config)
        shards, engines, rounds = config.rollout.shards, config.vllm.data_parallel_size, config.rounds
        starts = {stage: 0.0 if warm else speeds.at(start, pace) for stage, start in speeds.STARTS.items()}
        starts["update"] += speeds.at(speeds.BETWEEN, pace)
        flops = self.card.teraflops * 1e12 * speeds.at(speeds.TRAINING, pace)
        trained = rounds * config.rollout.generation_batch_size
        work = 2.0 * shape.parameters * self._packed_tokens * rounds + self._attention(shape, trained)
        work *= self._passes / flops
        seconds = {
            "rollout": self._decoding_seconds(pace) + starts["rollout"] * shards * engines * rounds,
            "update": work + (self._offload_seconds(pace) + starts["update"]) * rounds * config.deepspeed.processes,
        }
        seconds["rollout"] *= config.sampler_gpus / engines
        scored = counts["completions"] * config.dataset.max_prompt_length + counts["completion tokens"]
        for stage, dims in self._scorers.items():
            seconds[stage] = (2.0 * dims.parameters * scored + self._attention(dims, counts["completions"])) / flops
            seconds[stage] += starts["reference"] * shards * rounds * config.deepspeed.forward_processes
        return {stage: value / 3600 for stage, value in seconds.items()}

    def _decoding_seconds(self, pace: str) -> float:
        """Decoding time per GPU in seconds, summed over engines and rounds. In each step, a GPU reads its part of the
        weights and of the KV cache.
        """
        config, shape, counts, gpu = self.config, self.shape, tokens(self.config), _gpu(self.card)
        engines = config.rollout.shards * config.vllm.data_parallel_size
        room = self.memory.concurrent_sequences(self.memory.rollout(gpu))
        batch = max(1.0, min(gpu.sequences, counts["completions per round"] / engines, room))
        context = config.dataset.max_prompt_length + config.rollout.max_completion_length / 2
        weights = shape.in_sampler(config.model.dtype, config.rollout.quantization is not None)
        read_per_step = weights + batch * context * shape.cached(config.model.dtype)
        bandwidth = self.card.bandwidth * 1e12 * speeds.at(speeds.DECODING, pace) * config.vllm.tensor_parallel_size
        return counts["completion tokens"] / batch * read_per_step / bandwidth

    def _offload_seconds(self, pace: str) -> float:
        """Seconds per round in which a process moves offloaded weights and gradients, and runs AdamW on the CPU."""
        algorithm, deepspeed = self.config.algorithm, self.config.deepspeed
        learned = self.memory.trained / deepspeed.processes
        link = speeds.at(speeds.HOST_LINK, pace)
        steps, seconds = algorithm.num_iterations * algorithm.steps_per_generation, 0.0
        if deepspeed.offload.optimizer is not None:
            # gradients arrive, weights return; AdamW reads and writes 28 bytes per weight
            seconds += steps * learned * (6 / link + 28 / speeds.at(speeds.HOST_ADAM, pace))
        seconds += steps * 2 * memory.total(self.memory.on_disk()) / speeds.at(speeds.DISK, pace)
        if deepspeed.offload.parameters is not None:  # ZeRO 3 gathers all weights in each pass of each micro-batch
            share = self._packed_tokens / deepspeed.processes * deepspeed.sequence_parallel
            batches = max(1.0, share / deepspeed.micro_batch_tokens)
            seconds += batches * self._passes * self.memory.weights / deepspeed.processes / link
        return seconds


def own_reward_model(config: Config, shape: ModelDims) -> ModelDims:
    """The dimensions of the reward model that a run trains, given those of its model."""
    if config.reward_model is None or not config.reward_model.own_source:
        return shape
    return model_inputs.shape(config.of_reward_model, "reward_model")


def reward_model(config: Config, shape: ModelDims, room: float, card: Card | None) -> RewardModelCost | None:
    """The cost of the stage; None if the run trains no reward model.

    Args:
        config: the run's configuration, before `checkpointing.resolve_for`.
        shape: dimensions of the run's model.
        room: bytes that a process may use.
        card: the GPU; None for CPUs.

    Raises:
        UserError: as for `model_inputs.shape` and `dataset_inputs.training_rows`.
    """
    section = config.reward_model
    if section is None:
        return None
    dims = own_reward_model(config, shape)
    device = "cuda" if card else "cpu"
    config = config.of_reward_model.override({"update.lora": None, "update.optimizer": "adamw"})
    config = checkpointing.resolve_for(config, dims, device, room, "adamw")
    pairs, pair = section.batch_size / config.deepspeed.processes, 2 * section.max_length
    at_once = max(1.0, min(pairs, config.deepspeed.micro_batch_tokens // pair))
    # a head with one output has almost no logits
    batch = memory.MicroBatch(round(at_once * pair), 0, at_once < pairs)
    terms = RunMemory(config, dims, device).update(batch, distills=False)
    problem = ""
    if card and memory.total(terms) > room * memory.ROOM:
        problem = f"reward_model takes {memory.total(terms) / GB:,.0f} GB per GPU"
    rows = dataset_inputs.training_rows(config, dataset_inputs.PREFERENCES)
    tokens = None if rows is None else float(rows * section.num_train_epochs * pair)
    if card is None or tokens is None:
        return RewardModelCost(terms, tokens, None, problem)
    passes = 3 + config.deepspeed.recomputes
    work = 2.0 * dims.parameters * tokens * passes / (card.teraflops * 1e12 * speeds.TRAINING.typical)
    seconds = work + speeds.STARTS["update"].typical * config.deepspeed.processes
    return RewardModelCost(terms, tokens, seconds / 3600, problem)


def minutes(seconds: float) -> str:
    """Formats seconds: 5400 → 1 h 30 min."""
    whole = round(seconds / 60)
    return f"{whole // 60:,} h {whole % 60:02d} min" if whole >= 60 else f"{whole} min" if whole else f"{seconds:.0f} s"
