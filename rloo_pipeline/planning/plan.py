"""What a run will take, before anything is queued: jobs, tokens, disk, hours, and what will not fit on a card.

Counts are exact; tokens are at most, since completions may be shorter; hours are of an arithmetic whose assumptions
`ASSUMED` names, and are to be read as an order of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.planning import memory
from rloo_pipeline.planning.memory import GB


class Card(NamedTuple):
    """A GPU."""

    name: str
    gigabytes: float
    teraflops: float
    """Dense bfloat16, of the maker's data sheet (float16 where it has no bfloat16)."""
    bandwidth: float
    """TB/s of its memory."""


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
ROOM = 0.95
"""Share of a card that may be filled; the rest is fragmentation."""
MFU, DECODING = 0.3, 0.5
"""Shares of the peak that training reaches, and of the bandwidth that decoding does."""
BATCH = 256
"""Sequences that vLLM decodes at once, at most."""
STARTS = {"rollout": 90.0, "reference": 40.0, "update": 60.0}
"""Seconds that a job takes before it works."""
ASSUMED = (
    f"every completion as long as it may be; training at {MFU:.0%} of the card's peak in 16 bits, decoding at "
    f"{DECODING:.0%} of its bandwidth with up to {BATCH} sequences at once; starts of "
    + ", ".join(f"{seconds:.0f} s a {stage}" for stage, seconds in STARTS.items())
)
TABLE_BYTES = 30.0
"""A token's share of a round's tables: ids, log-probs and text, compressed."""


class Fit(NamedTuple):
    """A stage against the card."""

    stage: str
    terms: memory.Terms
    fits: bool
    advice: str = ""
    """The nearest setting that would fit, where it does not."""


def card_of(words: str) -> Card:
    """A card as `h100:80` or `h100` names it.

    Raises:
        UserError: it is not known, or its memory is no number.
    """
    name, _, size = words.lower().partition(":")
    if name not in CARDS:
        raise UserError(f"--cluster-gpu {words}: known are {', '.join(CARDS)}; name one, with its GB: h100:80")
    try:
        return CARDS[name]._replace(gigabytes=float(size)) if size else CARDS[name]
    except ValueError:
        raise UserError(f"--cluster-gpu {words}: '{size}' is no number of GB; write it as h100:80") from None


def jobs(config: Config) -> dict[str, int]:
    """Jobs of each stage in a run from the beginning."""
    shards = config.rollout.shards
    found = {"stage-assets": 1, "prompts": 1, "warmstart": 1, "probe": 1, "checks": 1}
    found |= {"rollout": shards, "score": shards}
    if config.tries_model:
        found |= {"trial-probe": 1, "trial-checks": 1}
    if config.uses_reference:
        found["reference"] = shards
    for stage in ("rollout", "score", "reference"):
        if stage in found:
            found[stage] *= config.rounds
    evaluated = len(config.evaluated)
    found |= {"update": config.rounds, "gate": config.rounds - 1, "evaluate": evaluated, "distance": evaluated - 1}
    if config.evaluation.harness:
        found |= {"stage-harness": 1, "harness": evaluated}
    return found | {"report": 1}


def tokens(config: Config) -> dict[str, float]:
    """Completions and tokens, at most."""
    samples = config.rollout.sampled_prompts * config.rollout.num_generations
    completion, prompt = config.rollout.max_completion_length, config.dataset.max_prompt_length
    return {
        "completions a round": samples,
        "completion tokens a round": samples * completion,
        "completions": samples * config.rounds,
        "completion tokens": samples * completion * config.rounds,
        "trained tokens": config.rollout.generation_batch_size * (prompt + completion) * config.rounds,
    }


def disk(config: Config, shape: ModelDims) -> dict[str, float]:
    """Bytes on disk when the run is done, and what is there in passing."""
    size, learned = BYTES[config.model.dtype], memory.trained(config, shape)
    policy = shape.parameters * size if config.update.lora is None else learned * size
    kept = config.rounds // config.keep_every + (1 if config.rounds % config.keep_every else 0)
    # two moments, a master weight where the engine keeps one of its own, weights where the policy's do not do
    own = size if config.update.lora is not None or config.deepspeed.zero_stage == 3 else 0
    trainer = learned * (8 + (4 if size == 2 or config.deepspeed.zero_stage else 0) + own)
    found = tokens(config)
    tables = (found["completion tokens"] + found["completions"] * config.dataset.max_prompt_length) * TABLE_BYTES
    return {
        f"policies ({kept} and policy 0)": shape.parameters * size + kept * policy,
        "trainer state": trainer,
        "the next policy and trainer state, while both are there": policy + trainer,
        "tables of rounds": tables,
    }


def fits(config: Config, shape: ModelDims, card: Card) -> Iterator[Fit]:
    """Each stage that computes, against the card."""
    room = card.gigabytes * GB * ROOM
    terms = memory.update(config, shape, "cuda")
    fit = memory.total(terms) <= room
    yield Fit("update", terms, fit, "" if fit else _nearest_update(config, shape, room))
    if config.uses_reference:
        terms = memory.reference(config, shape, "cuda")
        fit = memory.total(terms) <= room
        lower = "lower deepspeed.max_tokens_per_micro_batch, or take a card with more memory"
        yield Fit("reference", terms, fit, "" if fit else lower)
    terms = memory.rollout(config, shape, "cuda", card.gigabytes * GB)
    fit = at_once(config, shape, terms) >= 1
    yield Fit("rollout", terms, fit, "" if fit else _nearest_rollout(config, shape, card))


def at_once(config: Config, shape: ModelDims, terms: memory.Terms) -> float:
    """Sequences of full length that the KV cache holds."""
    longest = config.dataset.max_prompt_length + config.rollout.max_completion_length
    return terms["KV cache"] * config.vllm.tensor_parallel_size / (shape.cached(config.model.dtype) * longest)


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The configuration with some keys, named by dots, set otherwise."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(config, section)
        config = config.model_copy(update={section: part.model_copy(update={name: value})})
    return config


def _nearest_update(config: Config, shape: ModelDims, room: float) -> str:
    """The first of ever larger changes under which an update fits."""
    for changes in _changes(config):
        if memory.total(memory.update(changed(config, changes), shape, "cuda")) <= room:
            return "would fit with " + ", ".join(f"{key}: {str(value).lower()}" for key, value in changes.items())
    return "nothing tried would fit: take cards with more memory, LoRA (update.lora), or a smaller model"


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Checkpointing first, which costs a third more time; then smaller micro-batches; then more cards."""
    micro, checkpointing = "deepspeed.max_tokens_per_micro_batch", {"deepspeed.gradient_checkpointing": True}
    longest = config.dataset.max_prompt_length + config.rollout.max_completion_length
    sizes = [size for n in range(1, 8) if (size := config.deepspeed.max_tokens_per_micro_batch >> n) > longest]
    smaller = [{micro: size} for size in [*sizes, longest]]
    yield checkpointing
    yield from smaller
    yield from (checkpointing | change for change in smaller)
    for processes in (2, 4, 8):
        for stage in (1, 2, 3):
            if processes >= config.deepspeed.processes and stage >= config.deepspeed.zero_stage:
                more = {"deepspeed.processes": processes, "deepspeed.zero_stage": stage}
                yield more
                yield more | checkpointing
                yield more | checkpointing | {micro: longest}


def _nearest_rollout(config: Config, shape: ModelDims, card: Card) -> str:
    """The first number of GPUs whose KV cache holds a sequence."""
    for count in (2, 4, 8):
        more = changed(config, {"vllm.tensor_parallel_size": count})
        if at_once(more, shape, memory.rollout(more, shape, "cuda", card.gigabytes * GB)) >= 1:
            return f"would fit with vllm.tensor_parallel_size: {count}"
    return "nothing tried would fit: lower rollout.max_completion_length, or take cards with more memory"


def hours(config: Config, shape: ModelDims, card: Card) -> dict[str, float]:
    """GPU-hours of the rounds' stages, under ASSUMED."""
    found, size = tokens(config), BYTES[config.model.dtype]
    shards, parallel, processes = config.rollout.shards, config.vllm.tensor_parallel_size, config.deepspeed.processes
    speed = card.teraflops * 1e12 * MFU
    work = 2.0 * shape.parameters * found["trained tokens"]
    passes = 3 * config.algorithm.num_iterations * (4 / 3 if config.deepspeed.gradient_checkpointing else 1)
    old = 1 if config.algorithm.beta != 0 or config.algorithm.num_iterations > 1 else 0
    batch = min(BATCH, found["completions a round"] / shards)
    batch = max(1.0, min(batch, at_once(config, shape, memory.rollout(config, shape, "cuda", card.gigabytes * GB))))
    context = config.dataset.max_prompt_length + config.rollout.max_completion_length / 2
    read = shape.parameters * size + batch * context * shape.cached(config.model.dtype)
    seconds = {
        "rollout": found["completion tokens"] / batch * read / (card.bandwidth * 1e12 * DECODING)
        + STARTS["rollout"] * shards * config.rounds * parallel,
        "update": work * (passes + old) / speed + STARTS["update"] * config.rounds * processes,
    }
    if config.uses_reference:
        seconds["reference"] = work / speed + STARTS["reference"] * shards * config.rounds
    return {stage: value / 3600 for stage, value in seconds.items()}
