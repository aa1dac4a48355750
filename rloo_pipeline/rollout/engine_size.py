"""The settings of a vLLM engine, and its sizes at its start: context, KV cache, images per prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import engine_weights
from rloo_pipeline.runtime import devices
from rloo_pipeline.workers import engine_cache

CPU_MAX_SEQS = 256
"""Largest number of sequences in one batch on CPUs."""
CPU_BLOCK_SIZE = 128
"""Tokens in one block of the KV cache on CPUs."""
GPU_BLOCK_SIZE = 128
"""Sequence lengths are rounded up to multiples of this many tokens on GPUs; most kernels have blocks of 16."""
LIVE = {"hidden": 4, "heads": 2, "key_value": 4, "intermediate": 3}
"""Values per token that vLLM holds at once in a layer, as multiples of the layer's widths."""
LOGITS = 4
"""Copies of the float32 logits that vLLM holds at once while it samples."""
GB = 1e9
LOGPROBS_MODE = "processed_logprobs"


class EngineSettings(NamedTuple):
    """Options of the configuration that vLLM is started with."""

    dtype: Dtype
    gpu_memory_utilization: float
    kv_cache_gib: int
    tensor_parallel_size: int
    most_images: int = 0
    """Images that a prompt may have."""
    router_replay: bool = False
    """True if completions get the experts that vLLM chose."""
    quantization: str | None = None
    """vLLM's name of the scheme by which it quantizes weights as it loads them."""
    decode_context_parallel_size: int = 1


def settings(policy: Policy, engine: EngineSettings, max_model_len: int, seed: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a policy on this device.

    Raises:
        UserError: the KV cache cannot hold a sequence.
    """
    on_gpu = devices.device_type() == "cuda"
    arguments: dict[str, Any] = {
        "model": str(policy.base),
        "dtype": engine.dtype,
        "logprobs_mode": LOGPROBS_MODE,
        "max_model_len": max_model_len,
        "seed": seed & 0x7FFFFFFF,
        "trust_remote_code": policy.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "generation_config": "vllm",
        **image_settings(policy, engine.most_images),
    }
    if engine.decode_context_parallel_size > 1:
        arguments["decode_context_parallel_size"] = engine.decode_context_parallel_size
    if engine.quantization is not None:
        arguments["quantization"] = engine.quantization
    if engine.router_replay:
        # With a step ahead of its outputs in the queue, vLLM will not empty its cache for the next rollout.
        arguments |= {"enable_return_routed_experts": True, "async_scheduling": False}
    if policy.is_adapter:
        arguments |= engine_weights.adapter_settings(policy)
    if engine_cache.is_enabled() and on_gpu:
        arguments["enable_sleep_mode"] = True
    if not on_gpu:
        return arguments | cpu_settings(policy, engine.dtype, engine.kv_cache_gib, max_model_len)
    parallel = engine.tensor_parallel_size
    sizes = (visible_gpu(parallel), engine.gpu_memory_utilization, parallel, max_model_len)
    return arguments | gpu_settings(policy, engine.dtype, *sizes, quantized=engine.quantization is not None)


def visible_gpu(parallel: int) -> VisibleGpu:
    """The first GPU of this process. With several GPUs, vLLM forks processes, so CUDA must not start here."""
    from vllm.platforms import current_platform

    if parallel > 1:
        return VisibleGpu(current_platform.get_device_total_memory(), current_platform.get_device_name())
    import torch

    facts = torch.cuda.get_device_properties(0)  # also right for a slice of a GPU in MIG mode
    return VisibleGpu(facts.total_memory, facts.name)


def context_length(policy: Policy, needed: int) -> int:
    """A context for at least `needed` tokens, rounded up so that a later stage may have somewhat longer prompts.

    Raises:
        UserError: `needed` exceeds the context of the model.
    """
    longest = policy.context
    if longest is not None and needed > longest:
        raise UserError(
            f"{policy.base}: the longest prompt and max_completion_length make {needed} tokens, the model's context is "
            f"{longest}; lower dataset.max_prompt_length or rollout.max_completion_length"
        )
    rounded = -(-needed // 64) * 64
    return rounded if longest is None else min(rounded, longest)


def cache_bytes(dims: ModelDims | None, dtype: Dtype, most_gib: int, longest: int) -> int:
    """Size of the KV cache on CPUs in bytes.

    vLLM fills all of the cache with zeros when it starts, so it gets what a full batch of the longest sequences takes,
    and a quarter more for prompts that several sequences share.

    Args:
        dims: the model's dimensions; if None (unknown), the result is `most_gib`.
        dtype: the model's number format.
        most_gib: upper limit in GiB.
        longest: tokens of a prompt and its completion.
    """
    most = most_gib * 2**30
    if dims is None:
        return most
    tokens = CPU_MAX_SEQS * -(-longest // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE
    return min(most, tokens * dims.cached(dtype) * 5 // 4)


class VisibleGpu(NamedTuple):
    """A GPU as vLLM sees it."""

    memory: float
    """Bytes."""
    name: str

    @property
    def is_large(self) -> bool:
        """True if vLLM uses its larger batch defaults."""
        return self.memory >= 70 * 2**30 and "a100" not in self.name.lower()

    @property
    def sequences(self) -> int:
        """Maximum number of sequences in one batch."""
        return 1024 if self.is_large else 256

    @property
    def tokens(self) -> int:
        """Maximum number of tokens in one step."""
        return 16384 if self.is_large else 8192


class GpuBudget(NamedTuple):
    """Bytes that a vLLM engine takes on each GPU, computed before it starts."""

    engine: float
    """CUDA context, graphs and workspaces."""
    weights: float
    activations: float
    """Activations of the largest batch, with its logits."""
    cache: int
    """The KV cache."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


def gpu_budget(
    dims: ModelDims,
    dtype: Dtype,
    card: VisibleGpu,
    utilization: float,
    parallel: int,
    longest: int,
    recurrent: bool = False,
    quantized: bool = False,
) -> GpuBudget:
    """Divides vLLM's share of a GPU.

    The cache gets 1.25 times the size of a full batch of the longest sequences, as far as there is room. So vLLM need
    not measure memory, which would go wrong if other processes on the GPU start or end meanwhile.

    Args:
        dims: the model's dimensions.
        dtype: the model's number format.
        card: the GPU.
        utilization: `vllm.gpu_memory_utilization`, an upper limit.
        parallel: number of GPUs over which the model is split.
        longest: maximum number of tokens of a prompt with its completion.
        recurrent: True if layers have recurrent states, whose blocks have other sizes; the cache then gets all room.
        quantized: True with FP8 weights.

    Returns:
        The budget; its cache is 0 or less if there is no room for one.
    """
    size = BYTES[dtype]
    widths = dims._asdict()
    per_token = sum(multiple * widths[name] for name, multiple in LIVE.items()) * size
    logits = LOGITS * 4 * card.sequences * dims.vocabulary
    share = min(card.memory * utilization, card.memory - devices.idle_bytes("sampler"))
    fixed = GpuBudget(
        devices.IDLE["sampler"],
        dims.in_sampler(dtype, quantized) / parallel,
        (card.tokens * per_token + logits) / parallel,
        0,
    )
    tokens = card.sequences * -(-longest // GPU_BLOCK_SIZE) * GPU_BLOCK_SIZE
    most = float("inf") if recurrent else tokens * dims.cached(dtype) * 5 / 4
    return fixed._replace(cache=int(min(share - fixed.total, most)))


def gpu_settings(
    policy: Policy,
    dtype: Dtype,
    gpu: VisibleGpu,
    utilization: float,
    parallel: int,
    longest: int,
    quantized: bool = False,
) -> dict[str, Any]:
    """vLLM's settings for its share of a GPU; takes the arguments of `gpu_budget`.

    With `kv_cache_memory_bytes`, vLLM does not measure memory, which fails while other processes on the GPU start or
    end. vLLM then only requires that `gpu_memory_utilization` is free at its start. If config.json lacks sizes that we
    know, vLLM measures.

    Raises:
        UserError: the cache cannot hold a sequence.
    """
    dims = policy.dimensions
    if dims is None:
        return {"max_num_seqs": gpu.sequences, "gpu_memory_utilization": utilization}
    budget = gpu_budget(dims, dtype, gpu, utilization, parallel, longest, policy.is_recurrent, quantized)
    if budget.cache < (needed := dims.cached(dtype) * longest / parallel):
        raise UserError(
            f"vllm.gpu_memory_utilization: {utilization} of a GPU of {gpu.memory / GB:.1f} GB is too little: the "
            f"weights take {budget.weights / GB:.1f} GB, vLLM and its activations "
            f"{(budget.engine + budget.activations) / GB:.1f} GB, and the KV cache of one sequence of {longest} tokens "
            f"{needed / GB:.2f} GB; raise it, split the model (vllm.tensor_parallel_size), or lower "
            "rollout.max_completion_length"
        )
    return {
        "max_num_seqs": gpu.sequences,
        "kv_cache_memory_bytes": budget.cache,
        "gpu_memory_utilization": min(1.0, budget.total / gpu.memory),
    }


def cpu_settings(policy: Policy, dtype: Dtype, most_gib: int, longest: int) -> dict[str, Any]:
    """vLLM's settings on CPUs; takes the arguments of `cache_bytes`."""
    settings: dict[str, Any] = {
        "enforce_eager": True,
        # For a prompt split over two steps vLLM resets the random generator, which it cannot do on CPUs.
        "enable_chunked_prefill": False,
        "max_num_seqs": CPU_MAX_SEQS,
        "kv_cache_memory_bytes": cache_bytes(policy.dimensions, dtype, most_gib, longest),
    }
    if policy.is_recurrent:  # without chunks vLLM keeps no states for prompts that begin alike
        settings["enable_prefix_caching"] = False
    return settings


def image_settings(policy: Policy, most: int) -> dict[str, Any]:
    """vLLM's settings for a model of images whose prompts have at most `most` images; empty for other models.

    The processor normalizes pixels, as for the trainer: vLLM itself would take mean and deviation from files that may
    lack them.
    """
    if policy.image_kind is None:
        return {}
    videos = {} if policy.image_kind.video is None else {"video": 0}
    return {"limit_mm_per_prompt": {"image": most, **videos}, "mm_device_do_normalize": False}
