"""Compares ways to spread a run over N GPUs, by memory and time, for `rloo plan --gpus N`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import advice, checkpointing, model_inputs, queueing, speeds
from rloo_pipeline.before_run.cards import Card
from rloo_pipeline.before_run.estimate import GpuEstimate
from rloo_pipeline.config import Algorithm, Config, Lora, Mismatch, Offload, Rollout
from rloo_pipeline.config import lag as lags
from rloo_pipeline.config.error_messages import checked
from rloo_pipeline.config.section import BY_RUN
from rloo_pipeline.errors import UserError

PER_NODE = 8
"""Number of GPUs in a node, the most over which one engine can be split."""
SPLITS = 128
"""Maximum number of ways to divide nodes between sampling and training that are tried, evenly spaced if there are more
nodes.
"""
TURNS = "sample, then train"
BESIDE = "sampling beside training"
OPTIMIZER = "optimizer in host memory"
WEIGHTS = "weights there too"
ADAPTER = "an adapter"
KEYS = (
    *("deepspeed.processes", "deepspeed.nodes", "deepspeed.zero_stage", "deepspeed.max_tokens_per_micro_batch"),
    *("deepspeed.sequence_parallel", "deepspeed.offload", "rollout.shards", "rollout.lag"),
    *("vllm.tensor_parallel_size", "update.lora"),
)
"""Configuration keys that a layout sets."""
Changes = dict[str, Any]


class GpuLayout(NamedTuple):
    """A way to distribute a run over GPUs."""

    name: str
    config: Config
    gpus: int
    """Number of GPUs that the run holds."""
    problem: str
    """The stage that does not fit, and by how much; empty if all fit."""
    seconds: Mapping[str, float]
    """Seconds per round at each of `speeds.PACES`. If the two `sides` run concurrently, only the longer one counts."""
    sides: queueing.SideSeconds
    """Seconds to sample and to train a round, at the typical pace."""

    def hours(self, pace: str = "typical") -> float:
        """Hours of the run."""
        return self.seconds[pace] * self.config.rounds / 3600

    @property
    def gpu_hours(self) -> float:
        """Number of GPUs times hours."""
        return self.gpus * self.hours()


def layouts(config: Config, shape: ModelDims, card: Card, gpus: int) -> list[GpuLayout]:
    """The best layout of each kind. Those that fit come first, ordered by time; but layouts that compute what the
    configuration asks for come before those that change the lag or train an adapter.

    Args:
        config: the run's configuration.
        shape: the model's dimensions.
        card: the GPU.
        gpus: number of GPUs.
    """
    on_cpu, all_on_cpu = Offload(optimizer="cpu"), Offload(optimizer="cpu", parameters="cpu")
    kinds: dict[str, tuple[int, Iterable[Iterator[Changes]]]] = {
        TURNS: (gpus, [_in_turns(config, gpus, {})]),
        BESIDE: (gpus, _side_by_side(config, gpus)),
        f"{gpus // 2} of the GPUs": (gpus // 2, [_in_turns(config, gpus // 2, {})]),
        OPTIMIZER: (gpus, [_in_turns(config, gpus, {"deepspeed.offload": on_cpu})]),
        WEIGHTS: (gpus, [_in_turns(config, gpus, {"deepspeed.offload": all_on_cpu})]),
        ADAPTER: (gpus, [] if config.update.lora else [_in_turns(config, gpus, {"update.lora": Lora()})]),
    }
    found: list[GpuLayout] = []
    for name, (held, groups) in kinds.items():
        fitting = {layout.name for layout in found if not layout.problem}
        needless = fitting & {TURNS, OPTIMIZER} if name in (OPTIMIZER, WEIGHTS) else None
        tried = () if needless else (_first_that_fits(name, config, group, shape, card, held) for group in groups)
        if best := [layout for layout in tried if layout]:
            found.append(min(best, key=lambda layout: (bool(layout.problem), layout.seconds["typical"])))

    def order(layout: GpuLayout) -> tuple[bool, bool, bool, float]:
        other = not computes_the_same(layout, config)
        return bool(layout.problem), other, layout.name == ADAPTER, layout.seconds["typical"]

    return sorted(found, key=order)


def _first_that_fits(
    name: str, config: Config, candidates: Iterable[Changes], shape: ModelDims, card: Card, gpus: int
) -> GpuLayout | None:
    """The first candidate that fits. The cost of splitting engines, weights and gradients was not measured, so they are
    split only if necessary. If none fits, the last candidate, which needs the least memory; None if there is none.
    """
    layout = None
    for changes in candidates:
        parts = changes["deepspeed.sequence_parallel"], changes["vllm.tensor_parallel_size"]
        divides = not any(shape.query_heads % count for count in parts)
        if divides and advice.is_allowed(config.override(changes)):
            layout = _measured(name, config, changes, shape, card, gpus)
            if not layout.problem:
                break
    return layout


def _in_turns(config: Config, gpus: int, changes: Changes) -> Iterator[Changes]:
    """Candidates in which all GPUs sample and then all train; none without a GPU."""
    parts = product(_sampling(config.rollout, gpus), _training(config, gpus, changes) if gpus else ())
    return (changes | one | other | {"rollout.lag": 0} for one, other in parts)


def _side_by_side(config: Config, gpus: int) -> Iterator[Iterator[Changes]]:
    """Candidates in which some GPUs sample while the others train on earlier samples, for each number of GPUs that
    train.
    """
    lag = {"rollout.lag": config.rollout.lag or 1, **_correction(config.algorithm)}
    step = PER_NODE * -(-gpus // (PER_NODE * SPLITS))
    for trainers in range(1, gpus) if gpus <= PER_NODE else range(step, gpus, step):
        parts = product(_sampling(config.rollout, gpus - trainers), _training(config, trainers, {}))
        yield (one | other | lag for one, other in parts)


def _correction(algorithm: Algorithm) -> Changes:
    """The correction that a lag adds if the configuration has none."""
    if algorithm.old_logps == "sampler" or algorithm.mismatch.correction != "none":
        return {}
    of_tokens = algorithm.importance_sampling_level == "token"
    return {"algorithm.mismatch": Mismatch(**(lags.OF_TOKENS if of_tokens else lags.OF_COMPLETIONS))}


def _sampling(rollout: Rollout, gpus: int) -> Iterator[Changes]:
    """As many engines as fit on the GPUs, each split over 1, 2, 4 or 8 of them."""
    for parallel in (1, 2, 4, 8):
        if engines := gpus // (parallel + rollout.environment_gpus):
            yield {"vllm.tensor_parallel_size": parallel, "rollout.shards": min(engines, rollout.sampled_prompts)}


def _training(config: Config, gpus: int, changes: Changes) -> Iterator[Changes]:
    """ZeRO stages, each with the configured micro-batch and with one of a single sequence."""
    longest = config.longest_sequence
    size = config.deepspeed.micro_batch_tokens
    offload = changes.get("deepspeed.offload", Offload())
    nodes = -(-gpus // PER_NODE)
    if gpus % nodes:
        return
    stages = (3,) if offload.parameters else (2, 3) if offload.optimizer else (0, 2, 3) if gpus > 1 else (0,)
    for parts, stage in product(dict.fromkeys((1, config.deepspeed.sequence_parallel, *advice.PARTS)), stages):
        for micro_batch in dict.fromkeys((size, min(size, longest)) if parts == 1 else (min(size, longest),)):
            yield {
                "deepspeed.processes": gpus,
                "deepspeed.nodes": nodes,
                "deepspeed.zero_stage": stage,
                "deepspeed.offload": offload,
                "deepspeed.max_tokens_per_micro_batch": micro_batch,
                "deepspeed.sequence_parallel": parts,
            }


def fewest(config: Config, shape: ModelDims, card: Card, more_than: int) -> int | None:
    """The smallest power of 2, up to 128, of GPUs on which the run fits as it is; None if there is none."""
    counts = (count for count in (2, 4, 8, 16, 32, 64, 128) if count > more_than)
    return next((count for count in counts if one_fits(layouts(config, shape, card, count), config)), None)


def refusal(config: Config, gpus: int) -> str:
    """Why the configuration cannot train on all GPUs, regardless of memory."""
    try:
        changed = config.override({"deepspeed.processes": gpus})
        checked(Config, changed.model_dump(mode="json"), "with all in training", BY_RUN)
    except UserError as error:
        return str(error)
    return f"{gpus} processes cannot be spread evenly over nodes of {PER_NODE} GPUs"


def one_fits(found: Sequence[GpuLayout], config: Config) -> bool:
    """True if the first of these layouts fits and computes the same as the configuration."""
    return bool(found) and not found[0].problem and computes_the_same(found[0], config)


def computes_the_same(layout: GpuLayout, config: Config) -> bool:
    """True if a layout trains the same weights as the configuration, with the same lag."""
    return layout.config.rollout.lag == config.rollout.lag and layout.config.update.lora == config.update.lora


def _measured(name: str, config: Config, changes: Changes, shape: ModelDims, card: Card, gpus: int) -> GpuLayout:
    """Estimates the memory and times of a layout."""
    config = checkpointing.resolve_for(config.override(changes), shape, "cuda", card.room)
    estimated = GpuEstimate(config, shape, card, model_inputs.teacher_shape(config))
    sides = {pace: queueing.side_seconds(config, estimated.hours(pace)) for pace in speeds.PACES}
    return GpuLayout(
        name,
        config,
        gpus,
        estimated.problem,
        {pace: side.round_seconds(config.rollout.lag) for pace, side in sides.items()},
        sides["typical"],
    )
