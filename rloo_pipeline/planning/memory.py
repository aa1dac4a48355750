"""How much memory a stage needs at its peak, as named terms in bytes that add up.

The constants below are all there is to fit again when training or sampling changes. Those of CPUs were fitted to the
peak resident set of `rloo update` and `rloo rollout` (tests/stages/test_plan_memory.py measures them); those of GPUs
follow DeepSpeed's and vLLM's own accounts and are not measured here.
"""

from __future__ import annotations

from typing import NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.config import Config
from rloo_pipeline.rollout.engine_size import cache_bytes
from rloo_pipeline.training.deepspeed_config import stage_of

Terms = dict[str, float]
MB, GB, GIB = 1e6, 1e9, 2.0**30

PROCESS = {"cpu": 430 * MB, "cuda": 1.0 * GB}
"""An update before it has a model: interpreter, libraries; on GPUs the CUDA context and NCCL's buffers."""
SAMPLER = {"cpu": 800 * MB, "cuda": 2.5 * GB}
"""vLLM before it has a model; on GPUs with its graphs and workspaces."""
KEPT = {"hidden": 6.0, "heads": 10.0, "key_value": 7.0, "intermediate": 4.5}
"""Values that a layer keeps of a token for the backward pass, as multiples of its widths."""
KEPT_OF_OURS = {"hidden": 4.8, "heads": 7.5, "key_value": 5.8, "intermediate": 3.1}
"""The same in float32 on CPUs, where `training/kernels/layers.py` computes it."""
KEPT_IN_FLOAT32 = {"hidden": 2.0}
"""Of these, what stays in float32 in a model of 16 bits: norms."""
LOGITS = 2.0
"""Copies of the logits in float32 that are there at once."""
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
"""Logits that are held at once, by kind of device (`training/kernels/lm_head.py`)."""


class Work(NamedTuple):
    """What goes through a model at once."""

    tokens: int
    """Of the largest micro-batch, prompts and completions."""
    places: int
    """Of these, completion tokens."""
    several: bool
    """Whether there are more micro-batches in a step, so that gradients of one are there when the next comes."""


def work_of(config: Config) -> Work:
    """The largest micro-batch, if every prompt and completion is as long as it may be."""
    prompt, completion = config.dataset.max_prompt_length, config.rollout.max_completion_length
    each = prompt / config.rollout.num_generations + completion  # samples share their prompt's tokens
    sequences = config.rollout.generation_batch_size / config.algorithm.steps_per_generation
    whole = sequences / config.deepspeed.processes
    held = max(1.0, min(whole, config.deepspeed.max_tokens_per_micro_batch // each))
    return Work(round(held * each), round(held * completion), held < whole)


def trained(config: Config, shape: ModelDims) -> float:
    """Parameters that get gradients: all, or those of the adapter."""
    lora = config.update.lora
    if lora is None:
        return float(shape.parameters)
    hidden, wide = shape.hidden, shape.intermediate
    pairs = 2 * (hidden + shape.heads) + 2 * (hidden + shape.key_value) + 3 * (hidden + wide)
    return float(shape.layers * lora.r * pairs)


def update(config: Config, shape: ModelDims, chip: str, work: Work | None = None, first: bool = False) -> Terms:
    """One process of an update; the `first` has no optimizer state yet while activations are there.

    DeepSpeed keeps weights, gradients and, of 16-bit models, float32 master weights and gradients beside Adam's two
    moments; ZeRO 1 splits the optimizer with its weights over processes, 2 gradients too, 3 weights too. The backward
    pass frees activations while it makes gradients, so the gradients of a step's only micro-batch count where they are
    larger.
    """
    work = work or work_of(config)
    size, share, learned = BYTES[config.model.dtype], 1 / config.deepspeed.processes, trained(config, shape)
    stage = stage_of(config.model.dtype, config.deepspeed.zero_stage)
    split = {name: share if stage >= least else 1.0 for name, least in (("adam", 1), ("grads", 2), ("weights", 3))}
    master, sums = 4 if stage else 0, 4 if size == 2 else 0
    gradients = learned * size * split["grads"]
    optimizer = learned * ((8 + master) * split["adam"] + sums * split["grads"])
    forward = {"activations": activations(config, shape, work, chip), "logits": logits(config, shape, work, chip)}
    left = 0.0 if work.several else total(forward)
    if first:
        optimizer = max(0.0, gradients + optimizer - left)
        gradients = 0.0
    return {
        "process": PROCESS[chip],
        "weights": shape.parameters * size * split["weights"],
        "optimizer": optimizer,
        **forward,
        "gradients beside these": max(0.0, gradients - left),
    }


def reference(config: Config, shape: ModelDims, chip: str, work: Work | None = None) -> Terms:
    """Log-probs without gradients: weights, one layer's activations, logits."""
    work = work or work_of(config)
    one = _of_a_layer(config, shape, chip)
    return {
        "process": PROCESS[chip],
        "weights": float(shape.parameters * BYTES[config.model.dtype]),
        "activations": work.tokens * one,
        "logits": logits(config, shape, work, chip),
    }


def activations(config: Config, shape: ModelDims, work: Work, chip: str) -> float:
    """What the backward pass needs of the layers; with checkpointing the inputs of all layers and one layer whole."""
    one = _of_a_layer(config, shape, chip)
    if config.deepspeed.gradient_checkpointing:
        return work.tokens * (shape.layers * shape.hidden * BYTES[config.model.dtype] + one)
    return work.tokens * shape.layers * one


def _of_a_layer(config: Config, shape: ModelDims, chip: str) -> float:
    """Bytes that a layer keeps of one token."""
    size = BYTES[config.model.dtype]
    widths = shape._asdict()
    values = KEPT_OF_OURS if chip == "cpu" and size == 4 else KEPT
    kept = sum(float(times * widths[name]) for name, times in values.items()) * size
    return kept + sum(float(times * widths[name]) for name, times in KEPT_IN_FLOAT32.items()) * (4 - size)


def logits(config: Config, shape: ModelDims, work: Work, chip: str) -> float:
    """Logits of completion tokens, their softmax and its gradient, in float32: some at a time, but all in float16."""
    held = work.places * shape.vocabulary
    return LOGITS * 4 * (held if config.model.dtype == "float16" else min(held, LOGITS_AT_ONCE[chip]))


def rollout(config: Config, shape: ModelDims, chip: str, card: float | None = None) -> Terms:
    """One rollout, on a CPU or on each of the GPUs that hold the model together.

    Args:
        card: bytes of a GPU's memory, of which vLLM takes its share whole.
    """
    parallel = config.vllm.tensor_parallel_size
    weights = shape.parameters * BYTES[config.model.dtype] / parallel
    if card is None:
        longest = config.dataset.max_prompt_length + config.rollout.max_completion_length
        cache = cache_bytes(shape, config.model.dtype, config.vllm.kv_cache_gib, longest)
        return {"process": SAMPLER[chip], "weights": weights, "KV cache": float(cache)}
    rest = card * config.vllm.gpu_memory_utilization - weights - SAMPLER[chip]
    return {"process": SAMPLER[chip], "weights": weights, "KV cache": max(rest, 0.0)}


def total(terms: Terms) -> float:
    """All terms together."""
    return sum(terms.values())
