"""Suggests settings with which a stage would fit on a GPU."""

from collections.abc import Iterable, Iterator
from typing import Any

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run.memory import GB, RunMemory, total
from rloo_pipeline.config import Config, Deepspeed, Offload
from rloo_pipeline.config.loading import flow
from rloo_pipeline.config.section import BY_RUN
from rloo_pipeline.rollout.engine_arguments import VisibleGpu

PARTS = (2, 4, 8)
"""Values of deepspeed.sequence_parallel to try."""
MICRO_BATCH, CHECKPOINTING = "deepspeed.max_tokens_per_micro_batch", {"deepspeed.gradient_checkpointing": True}


def nearest_update(config: Config, shape: ModelDims, room: float) -> str:
    """Suggests the cheapest change with which an update fits. If that needs more GPUs, also suggests one that offloads
    the optimizer, or the weights too, to host memory.

    Args:
        config: the run's configuration.
        shape: the model's dimensions.
        room: usable bytes of a GPU.
    """

    def first(candidates: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        for changes in candidates:
            changed = config.override(changes)
            if shape.query_heads % changed.deepspeed.sequence_parallel:
                continue
            if is_allowed(changed) and total(RunMemory(changed, shape).update()) <= room:
                return changes
        return None

    deepspeed, longest = config.deepspeed, config.longest_sequence
    nearest, offload = first(_changes(deepspeed, longest)), None
    if nearest is None or nearest.get("deepspeed.processes", deepspeed.processes) > deepspeed.processes:
        offload = first(_offloads(deepspeed, longest))
    if nearest is None and offload is None:
        return "no setting that was tried would fit: use cards with more memory, LoRA (update.lora), or a smaller model"
    advice = [] if nearest is None else [_as_yaml(nearest)]
    if offload is not None:
        host = total(RunMemory(config.override(offload), shape).offloaded()) / GB
        advice.append(f"{_as_yaml(offload)}, which takes {host:,.1f} GB of the node's memory for each process")
    return "would fit with " + "; or, without more GPUs, with ".join(advice)


def _as_yaml(changes: dict[str, Any]) -> str:
    """Formats changes as they are written in a configuration."""
    dumped = {key: value.model_dump(exclude_none=True) for key, value in changes.items() if isinstance(value, Offload)}
    return flow(changes | dumped)[1:-1]  # without the braces


def _changes(deepspeed: Deepspeed, longest: int) -> Iterator[dict[str, Any]]:
    """Changes to try: checkpointing, which costs a third more time; then smaller micro-batches, sequences split over
    processes, and more cards.
    """
    sizes = [size for n in range(1, 8) if (size := deepspeed.micro_batch_tokens >> n) > longest]
    smaller = [{MICRO_BATCH: size} for size in [*sizes, longest]]
    yield CHECKPOINTING
    yield from smaller
    yield from (CHECKPOINTING | change for change in smaller)
    split = [{"deepspeed.sequence_parallel": parts, MICRO_BATCH: longest} | CHECKPOINTING for parts in PARTS]
    yield from split
    for processes in (2, 4, 8):
        for stage in (1, 2, 3):
            if processes >= deepspeed.processes and stage >= deepspeed.zero_stage:
                more = {"deepspeed.processes": processes, "deepspeed.zero_stage": stage}
                yield from _with_fewer_activations(more, longest)
                yield from (more | change for change in split)


def _offloads(deepspeed: Deepspeed, longest: int) -> Iterator[dict[str, Any]]:
    """Changes to try with the same GPUs: the optimizer in host memory, then the weights too."""
    for stage, offload in ((2, Offload(optimizer="cpu")), (3, Offload(optimizer="cpu", parameters="cpu"))):
        if stage >= deepspeed.zero_stage:
            yield from _with_fewer_activations({"deepspeed.offload": offload, "deepspeed.zero_stage": stage}, longest)


def is_allowed(config: Config) -> bool:
    """True if a configuration would be accepted."""
    try:
        Config.model_validate(config.model_dump(mode="json"), context=BY_RUN)
    except ValueError:
        return False
    return True


def _with_fewer_activations(changes: dict[str, Any], longest: int) -> Iterator[dict[str, Any]]:
    """These changes alone, then together with changes that reduce activations."""
    yield changes
    yield changes | CHECKPOINTING
    yield changes | CHECKPOINTING | {MICRO_BATCH: longest}


def nearest_rollout(config: Config, shape: ModelDims, card: VisibleGpu) -> str:
    """Suggests the smallest number of GPUs whose KV cache holds one sequence."""
    for count in (count for count in (2, 4, 8) if shape.query_heads % count == 0):
        wider = RunMemory(config.override({"vllm.tensor_parallel_size": count}), shape)
        if wider.concurrent_sequences(wider.rollout(card)) >= 1:
            return f"would fit with vllm.tensor_parallel_size: {count}"
    return "no setting that was tried would fit: lower rollout.max_completion_length, or use cards with more memory"
