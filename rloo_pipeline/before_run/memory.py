"""Peak memory of a stage, as named terms in bytes that add up.

If training or sampling changes, fit only the constants below again. The CPU constants were fitted to the peak resident
set of `rloo update` and `rloo rollout` (measured by tests/stages/test_plan_memory.py). The GPU constants follow
DeepSpeed's and vLLM's documentation (measured by the row `memory` of `make gpu`).
"""

from __future__ import annotations

from typing import NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.config import Config, Dtype, Model, Update
from rloo_pipeline.rollout.engine_arguments import EngineSettings, VisibleGpu, cache_bytes, gpu_budget
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.deepspeed_internals import nvme
from rloo_pipeline.training.deepspeed_internals.deepspeed_config import effective_zero_stage

Terms = dict[str, float]
MB, GB = 1e6, 1e9
ROOM = 0.95
"""Share of the memory that may be used; the rest is lost to fragmentation."""

PROCESS = {"cpu": 430 * MB, "cuda": devices.IDLE["trainer"]}
"""An update before it loads a model: interpreter and libraries; on GPUs the CUDA context and NCCL's buffers."""
SAMPLER = 800 * MB
"""vLLM on CPUs before it loads a model."""
KEPT = {"hidden": 6.0, "heads": 10.0, "key_value": 7.0, "intermediate": 4.5}
"""Values per token that a layer keeps for the backward pass, as multiples of its widths."""
KEPT_IN_FLOAT32 = {"hidden": 2.0}
"""The part of these that stays in float32 in a 16-bit model: norms."""
LIVE = 1e9
"""Weights that DeepSpeed has on a GPU at most where they are offloaded (its `stage3_max_live_parameters`)."""
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0 + 2 * 4 / 256, "adafactor": 0.0, "muon": 4.0}
"""Bytes of optimizer state per trained parameter. An 8-bit state has a float32 scale per 256 numbers, Adafactor's rows
and columns do not count, and Muon has AdamW's two moments for parameters outside the matrices of the layers.
"""
SCRATCH = {
    "adamw": {"cpu": 0.0, "cuda": 0.0},
    "adamw_8bit": {"cpu": 24.0, "cuda": 0.0},
    "adafactor": {"cpu": 12.0, "cuda": 12.0},
    "muon": {"cpu": 16.0, "cuda": 16.0},
}
"""Bytes that a step of the optimizer takes for a while, per number of the largest parameter: read from the
libraries' code, not fitted.
"""
LOGITS = 2.0
"""Copies of the logits in float32 that exist at once."""
LIKELIEST = {"ids": 16.0, "divergence": 100.0, "tables": 8.0, "tensors": 19.0}
"""Bytes for each of a teacher's likeliest tokens (`algorithm.teacher.top_k`): its ids in a micro-batch, the divergence
in float64 with its gradient, and on the host the round's tables and what an update makes of them.
"""
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
"""Logits that are held at once, by kind of device (`training/kernels/lm_head.py`)."""


class MicroBatch(NamedTuple):
    """The part of the largest batch that one process passes through a model at once."""

    tokens: int
    """Prompt and completion tokens."""
    completion_tokens: int
    """Completion tokens."""
    several: bool
    """True if a step has several micro-batches, so that gradients exist while activations do."""


def micro_batch_of(config: Config) -> MicroBatch:
    """A process's part of the largest micro-batch, with every prompt and completion at its maximum length."""
    prompt, completion = config.dataset.max_prompt_length, config.rollout.max_completion_length
    shared_by = 1 if config.dataset.shows_images else config.rollout.num_generations
    per_sequence = prompt / shared_by + completion  # samples share their prompt's tokens, but not with images
    sequences = config.rollout.generation_batch_size / config.algorithm.steps_per_generation
    parts = config.deepspeed.sequence_parallel
    per_group = sequences * parts / config.deepspeed.processes
    size = max(1.0, min(per_group, config.deepspeed.micro_batch_tokens // per_sequence))
    return MicroBatch(round(size * per_sequence / parts), round(size * completion / parts), size < per_group)


def trained(config: Config, shape: ModelDims) -> float:
    """Number of parameters that get gradients: all, or those of the LoRA adapter; a vision encoder may be frozen."""
    lora = config.update.lora
    if lora is None:
        return float(shape.parameters - (0 if config.model.train_vision else shape.vision))
    hidden, intermediate = shape.hidden, shape.intermediate
    pairs = 2 * (hidden + shape.heads) + 2 * (hidden + shape.key_value) + 3 * (hidden + intermediate)
    return float(shape.layers * lora.r * pairs)


def update(
    config: Config,
    shape: ModelDims,
    device: str,
    batch: MicroBatch | None = None,
    first: bool = False,
    distills: bool = True,
) -> Terms:
    """Memory of one process of an update.

    DeepSpeed keeps weights, gradients and Adam's two moments; for 16-bit models also float32 master weights and
    gradients. ZeRO 1 splits the optimizer state over processes, ZeRO 2 also the gradients, ZeRO 3 also the weights. The
    backward pass frees activations while it makes gradients, so with a single micro-batch per step only the excess of
    the gradients over activations and logits counts.

    Args:
        config: the run's configuration.
        shape: the model's dimensions.
        device: cpu or cuda.
        batch: the micro-batch; the largest one if None.
        first: True for the first update, which has no optimizer state while activations exist.
        distills: False for other trainings, which have no teacher.
    """
    batch = batch or micro_batch_of(config)
    size, share, learned = BYTES[config.model.dtype], 1 / config.deepspeed.processes, trained(config, shape)
    stage = effective_zero_stage(config.model.dtype, config.deepspeed.zero_stage)
    split = {name: share if stage >= least else 1.0 for name, least in (("adam", 1), ("grads", 2), ("weights", 3))}
    sums = 4 if size == 2 else 0
    gradients = learned * size * split["grads"]
    optimizer = state(config, shape) * split["adam"] + learned * sums * split["grads"]
    weights = weight_bytes(config.model, shape) * split["weights"]
    if device == "cuda" and config.deepspeed.offload.optimizer is not None:
        optimizer = learned * sums * split["grads"] if stage < 3 else 0.0
    if device == "cuda" and config.deepspeed.offload.parameters is not None:
        weights = min(float(shape.parameters), LIVE) * size
    forward = {"activations": activations(config, shape, batch, device), "logits": logits(config, shape, batch, device)}
    if distills := distills and config.algorithm.teacher_top_k > 0:
        forward["teacher's tokens"] = _likeliest(config, shape, batch, device)
    freed = 0.0 if batch.several else total(forward)
    scratch = SCRATCH[config.update.optimizer][device] * _largest(config.update, shape)
    if device == "cuda" and config.deepspeed.offload.on_disk:  # through which DeepSpeed's gradients go in float32
        scratch += learned * 4 * share
    if first:
        optimizer = max(0.0, gradients + optimizer + scratch - freed)
        gradients = scratch = 0.0
    return {
        "process": PROCESS[device],
        "weights": weights,
        "optimizer": optimizer,
        **forward,
        "gradients beyond these": max(0.0, gradients - freed, gradients + scratch - total(forward)),
        **(_teacher_tables(config) if distills and device == "cpu" else {}),
    }


def offloaded(config: Config, shape: ModelDims) -> Terms:
    """Memory of the node that one process of an update on a GPU takes besides its own."""
    terms = _teacher_tables(config)
    stage = effective_zero_stage(config.model.dtype, config.deepspeed.zero_stage)
    learned, share = trained(config, shape), 1 / config.deepspeed.processes
    largest = shape.hidden * max(shape.intermediate, shape.heads, shape.vocabulary) * share
    if config.deepspeed.offload.optimizer == "nvme":
        terms["buffers"] = nvme.BUFFERS * 4 * min(nvme.SUB_GROUP + largest, learned * share)
        terms["gradients"] = learned * 4 * share
    elif config.deepspeed.offload.optimizer is not None:
        terms["optimizer"] = state(config, shape) * share
        # DeepSpeed's float32 gradients of the step and, under ZeRO 3, their sums
        terms["gradients"] = learned * (8 if stage == 3 else 4) * share
    if config.deepspeed.offload.parameters == "nvme":
        terms["buffers"] += nvme.READ * 2 * (largest + nvme.ALIGNED)
    elif config.deepspeed.offload.parameters is not None:
        terms["weights"] = weight_bytes(config.model, shape) * share
    if config.deepspeed.gradient_checkpointing == "offload":
        terms["inputs of layers"] = _layer_inputs(config.model.dtype, shape, micro_batch_of(config))
    return terms


def on_disk(config: Config, shape: ModelDims) -> Terms:
    """Bytes that one process of an update on a GPU has on the disk of its node."""
    offload, share = config.deepspeed.offload, trained(config, shape) / config.deepspeed.processes
    places = {"optimizer": offload.optimizer, "parameters": offload.parameters}
    return {name: nvme.WRITTEN[name] * share for name, place in places.items() if place == "nvme"}


def weight_bytes(model: Model, shape: ModelDims) -> float:
    """Bytes of all weights as the trainer holds them; NF4 has 4 bits and a float32 scale per 64 weights."""
    size = BYTES[model.dtype]
    in_4_bits = _in_layers(shape) if model.quantization else 0
    return in_4_bits * (0.5 + 4 / 64) + (shape.parameters - in_4_bits) * size


def _in_layers(shape: ModelDims) -> int:
    """Weights in the matrices of all layers; those of experts are not among them."""
    layer = 2 * shape.hidden * (shape.heads + shape.key_value) + 3 * shape.hidden * shape.intermediate
    return min(shape.parameters, shape.layers * layer)


def state(config: Config, shape: ModelDims) -> float:
    """Bytes of optimizer state and of DeepSpeed's float32 weights, of all processes together."""
    stage = effective_zero_stage(config.model.dtype, config.deepspeed.zero_stage)
    return moments(config, shape) + trained(config, shape) * (4 if stage else 0)


def moments(config: Config, shape: ModelDims) -> float:
    """Bytes of optimizer state of all trained parameters, without float32 copies of weights."""
    name, learned = config.update.optimizer, trained(config, shape)
    apart = shape.parameters - _in_layers(shape) if name == "muon" and config.update.lora is None else 0
    return MOMENTS[name] * learned + (MOMENTS["adamw"] - MOMENTS["muon"]) * apart


def _largest(update: Update, shape: ModelDims) -> float:
    """Numbers in the largest trained parameter."""
    if update.lora is not None:
        return float(update.lora.r * max(shape.hidden, shape.intermediate))
    apart = 0 if update.optimizer == "muon" else shape.vocabulary
    return float(shape.hidden * max(shape.intermediate, shape.heads, apart))


def reference(config: Config, shape: ModelDims, device: str, batch: MicroBatch | None = None) -> Terms:
    """Memory of log-probs without gradients: weights, one layer's activations, logits."""
    batch, share = batch or micro_batch_of(config), config.deepspeed.processes if config.deepspeed.splits_weights else 1
    return {
        "process": PROCESS[device],
        "weights": shape.parameters * BYTES[config.model.dtype] / share,
        "activations": batch.tokens * _layer_bytes(config.model.dtype, shape),
        "logits": logits(config, shape, batch, device),
    }


def activations(config: Config, shape: ModelDims, batch: MicroBatch, device: str) -> float:
    """Activations for the backward pass; with checkpointing, the inputs of all layers and one layer in full."""
    per_layer = _layer_bytes(config.model.dtype, shape)
    if not config.deepspeed.recomputes:
        return batch.tokens * shape.layers * per_layer
    offloads = device == "cuda" and config.deepspeed.gradient_checkpointing == "offload"
    return batch.tokens * per_layer + (0 if offloads else _layer_inputs(config.model.dtype, shape, batch))


def _layer_inputs(dtype: Dtype, shape: ModelDims, batch: MicroBatch) -> float:
    """Inputs of all layers."""
    return float(batch.tokens * shape.layers * shape.hidden * BYTES[dtype])


def _layer_bytes(dtype: Dtype, shape: ModelDims) -> float:
    """Bytes per token that a layer keeps."""
    size = BYTES[dtype]
    widths = shape._asdict()
    all_values = sum(float(multiple * widths[name]) for name, multiple in KEPT.items()) * size
    return all_values + sum(float(n * widths[name]) for name, n in KEPT_IN_FLOAT32.items()) * (4 - size)


def logits(config: Config, shape: ModelDims, batch: MicroBatch, device: str) -> float:
    """Logits of completion tokens, their softmax and its gradient, in float32; all at once only in float16 models."""
    count, most = (
        batch.completion_tokens * shape.vocabulary,
        LOGITS_AT_ONCE[device] / config.deepspeed.sequence_parallel,
    )
    return LOGITS * 4 * (count if config.model.dtype == "float16" else min(count, most))


def _likeliest(config: Config, shape: ModelDims, batch: MicroBatch, device: str) -> float:
    """Bytes of a teacher's likeliest tokens in a micro-batch; the divergence of a group of sequences is computed at
    once, on each of the ranks that share a micro-batch.
    """
    at_once = tokens = batch.completion_tokens * config.deepspeed.sequence_parallel
    if config.model.dtype != "float16":
        at_once = min(tokens, max(LOGITS_AT_ONCE[device] // shape.vocabulary, config.rollout.max_completion_length))
    ids = LIKELIEST["ids"] * batch.completion_tokens
    return config.algorithm.teacher_top_k * (ids + LIKELIEST["divergence"] * at_once)


def _teacher_tables(config: Config) -> Terms:
    """Bytes of a teacher's likeliest tokens of a round, which each process of an update holds on the host."""
    if not (values := config.algorithm.teacher_top_k * config.rollout.max_completion_length):
        return Terms()
    sampled = config.rollout.sampled_prompts * config.rollout.num_generations
    tensors = LIKELIEST["tensors"] * config.rollout.generation_batch_size
    return {"teacher's tables": values * (LIKELIEST["tables"] * sampled + tensors)}


def rollout(config: Config, shape: ModelDims, card: VisibleGpu | None = None) -> Terms:
    """Memory of a rollout: of all its engines on a CPU (`card` is None), or on each GPU of a tensor-parallel group."""
    settings = EngineSettings.of(config.model, config.vllm, config.rollout)
    longest = config.dataset.max_prompt_length + config.rollout.max_completion_length
    if card is None:
        weights = shape.in_sampler(settings.dtype, settings.quantization is not None)
        engine = {
            "process": SAMPLER,
            "weights": weights / settings.tensor_parallel_size,
            "KV cache": float(cache_bytes(shape, settings, longest)),
        }
        return {name: size * config.vllm.data_parallel_size for name, size in engine.items()}
    budget = gpu_budget(shape, settings, card, longest)
    return {
        "process": budget.engine,
        "weights": budget.weights,
        "activations": budget.activations,
        "KV cache": float(max(budget.cache, 0)),
    }


def concurrent_sequences(config: Config, shape: ModelDims, terms: Terms) -> float:
    """Number of sequences of full length that fit into the KV cache."""
    longest = config.dataset.max_prompt_length + config.rollout.max_completion_length
    return terms["KV cache"] * config.vllm.tensor_parallel_size / (shape.cached(config.model.dtype) * longest)


def total(terms: Terms) -> float:
    """Sum of the terms."""
    return sum(terms.values())
