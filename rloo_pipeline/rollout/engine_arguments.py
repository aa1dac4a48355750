"""The arguments of a vLLM engine for a policy on this device; refuses what vLLM cannot sample there.

vLLM itself would fail deep inside an engine, or not notice. Sizes of context, KV cache and batches are computed before
an engine starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts.model_dims import BYTES, ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dtype, Model, Rollout, Vllm
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training import model_support
from rloo_pipeline.workers import engine_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads for which vLLM's CPU kernel is compiled."""
LATENT = 576
"""Size of latent attention (kv_lora_rank plus qk_rope_head_dim) for which it is compiled."""
QUANTIZATION = "fp8_per_channel"
"""The only `rollout.quantization` for which vLLM has layers on CPUs, through PyTorch."""
DELTA_HEADS = (64, 128)
"""Sizes of DeltaNet heads for which it is compiled."""
MULTIPLE = 32
"""The hidden size of a model with experts must be a multiple of this. vLLM pads the width of experts, except in
gpt-oss.
"""
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
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank that vLLM allows."""
GB = 1e9
LOGPROBS_MODE = "processed_logprobs"


class EngineSettings(NamedTuple):
    """Settings of the configuration with which vLLM is started."""

    dtype: Dtype
    gpu_memory_utilization: float
    kv_cache_gib: int
    tensor_parallel_size: int
    most_images: int = 0
    """Maximum number of images in a prompt."""
    router_replay: bool = False
    """True if vLLM also returns the experts that it chose."""
    quantization: str | None = None
    """vLLM's name for the scheme that quantizes weights as they are loaded."""
    decode_context_parallel_size: int = 1

    @classmethod
    def of(
        cls, model: Model, vllm: Vllm, rollout: Rollout, most_images: int = 0, for_rollouts: bool = True
    ) -> EngineSettings:
        """The settings for rollouts, or for an evaluation, which `rollout.quantization` does not affect."""
        taken: dict[str, Any] = {name: getattr(vllm, name) for name in cls._fields if name in Vllm.model_fields}
        taken |= {"most_images": most_images, "router_replay": rollout.router_replay}
        return cls(model.dtype, **taken, quantization=rollout.quantization if for_rollouts else None)


def arguments(policy: Policy, engine: EngineSettings, needed: int, seed: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a policy on this device, with a context of at least `needed` tokens.

    Raises:
        UserError: vLLM cannot sample the policy on this device, `needed` exceeds the model's context, or the KV cache
            cannot hold a sequence.
    """
    on_gpu = devices.device_type() == "cuda"
    if on_gpu and policy.is_adapter:
        model_support.check_dtype_on_gpu(engine.dtype)
    if on_gpu and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        check_invariant(policy, engine.quantization)
    if not on_gpu:
        check_on_cpu(policy, engine.dtype, engine.quantization, engine.router_replay)
    longest = context_length(policy, needed)
    given: dict[str, Any] = {
        "model": str(policy.base),
        "dtype": engine.dtype,
        "logprobs_mode": LOGPROBS_MODE,
        "max_model_len": longest,
        "seed": seed & 0x7FFFFFFF,
        "trust_remote_code": policy.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "generation_config": "vllm",
    }
    if engine.decode_context_parallel_size > 1:
        given["decode_context_parallel_size"] = engine.decode_context_parallel_size
    if engine.quantization is not None:
        given["quantization"] = engine.quantization
    if engine.router_replay:
        # With a step queued ahead of its outputs, vLLM would refuse to empty its cache before the next rollout.
        given |= {"enable_return_routed_experts": True, "async_scheduling": False}
    if policy.image_kind is not None:
        videos = {} if policy.image_kind.video is None else {"video": 0}
        # The processor normalizes pixels, as for the trainer: vLLM would read mean and deviation from files that may
        # lack them.
        given |= {"limit_mm_per_prompt": {"image": engine.most_images, **videos}, "mm_device_do_normalize": False}
    if policy.is_adapter:
        given |= adapter_arguments(policy)
    if not on_gpu:
        return given | cpu_arguments(policy, engine, longest)
    if engine_cache.is_enabled():
        given["enable_sleep_mode"] = True
    return given | gpu_arguments(policy, engine, visible_gpu(engine.tensor_parallel_size), longest)


def check_invariant(policy: Policy, quantization: str | None) -> None:
    """Raises UserError if vLLM has no batch-invariant kernels for a policy, which `reproducible` needs on GPUs."""
    if quantization == "fp8_per_tensor" and policy.has_experts:  # vLLM's issue 57016
        raise UserError(
            "rollout.quantization: with fp8_per_tensor, vLLM rounds the inputs of experts by the largest of the batch, "
            "so completions depend on the batch; use fp8_per_channel or fp8_per_block, or reproducible: false"
        )
    if policy.is_recurrent:
        raise UserError(
            f"{policy.config_file}: vLLM has no batch-invariant kernels for the model's recurrent layers; set "
            "reproducible: false"
        )


def check_on_cpu(policy: Policy, dtype: Dtype, quantization: str | None, router_replay: bool) -> None:
    """Checks from config.json that a sampler on CPUs can hold a policy.

    Args:
        policy: the policy.
        dtype: number format of the sampler.
        quantization: the scheme of `rollout.quantization`, if any.
        router_replay: `rollout.router_replay`.

    Raises:
        UserError: vLLM cannot sample it.
    """
    if router_replay:
        raise UserError(
            "rollout.router_replay: vLLM returns the experts of its tokens on GPUs only; set it to false, or sample on "
            "a GPU"
        )
    if quantization not in (None, QUANTIZATION):
        raise UserError(
            f"rollout.quantization: {quantization} needs a GPU; on CPUs set {QUANTIZATION}, or leave it out"
        )
    text = policy.text_config
    if text.get("linear_num_value_heads"):
        _check_delta_net(policy.config_file, text, dtype)
    if policy.has_experts:
        _check_experts(policy.config_file, text)


def _check_delta_net(file: Path, text: Mapping[str, Any], dtype: Dtype) -> None:
    if dtype != "bfloat16":
        raise UserError(
            f"{file}: vLLM on CPUs computes DeltaNet layers (linear_num_value_heads) in bfloat16 only, not {dtype}; "
            "set model.dtype: bfloat16, or sample on a GPU"
        )
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if text.get(key) not in {*DELTA_HEADS, None}:
            raise UserError(
                f"{file}: vLLM on CPUs computes DeltaNet layers whose heads have {' or '.join(map(str, DELTA_HEADS))} "
                f"dimensions, and {key} is {text[key]}; use another model, or sample on a GPU"
            )


def _check_experts(file: Path, text: Mapping[str, Any]) -> None:
    for key in ("hidden_size", *(["intermediate_size"] if text.get("model_type") == "gpt_oss" else [])):
        if int(text.get(key) or 0) % MULTIPLE:
            raise UserError(
                f"{file}: vLLM on CPUs computes experts of sizes that are multiples of {MULTIPLE}, and {key} is "
                f"{text[key]}; use another model, or sample on a GPU"
            )


def check_heads(policy: Policy, model: ModelConfig) -> None:
    """Checks the attention heads of a model, as read by a started engine.

    Raises:
        UserError: vLLM cannot compute them on a CPU.
    """
    if model.use_mla or not model.is_attention_free:
        _check_head(policy.config_file, model.get_head_size(), model.use_mla)


def check_configured_heads(policy: Policy) -> None:
    """Applies `check_heads` to config.json, without an engine; skips models whose config.json does not give the heads.

    Raises:
        UserError: vLLM cannot compute these heads on a CPU.
    """
    text = policy.text_config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    size = text.get("head_dim") or (hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else None)
    if isinstance(size, int) and not text.get("kv_lora_rank") and not policy.is_recurrent:
        _check_head(policy.config_file, size, latent=False)


def _check_head(file: Path, size: int, latent: bool) -> None:
    if latent and size != LATENT:
        raise UserError(
            f"{file}: vLLM on CPUs computes latent attention whose kv_lora_rank and qk_rope_head_dim add up to "
            f"{LATENT}, not {size}; use another model, or sample on a GPU"
        )
    if not latent and size not in HEADS:
        raise UserError(
            f"{file}: vLLM on CPUs computes attention heads of {', '.join(map(str, HEADS))} dimensions, not {size}; "
            "use another model, or sample on a GPU"
        )


def context_length(policy: Policy, needed: int) -> int:
    """A context for at least `needed` tokens, rounded up for later stages with somewhat longer prompts, but not
    beyond the length from which vLLM would use another rotary embedding for all sequences.

    Raises:
        UserError: `needed` exceeds the context of the model.
    """
    longest = policy.context
    if longest is not None and needed > longest:
        raise UserError(
            f"{policy.base}: the longest prompt and max_completion_length add up to {needed} tokens, but the model's "
            f"context is {longest}; lower dataset.max_prompt_length or rollout.max_completion_length"
        )
    limit = policy.length_limit
    rounded = -(-needed // 64) * 64
    return max(needed, min(filter(None, (rounded, longest, limit and limit.tokens))))


def adapter_arguments(policy: Policy) -> dict[str, Any]:
    """Arguments for a policy's adapter.

    They name the modules that the adapter changes; otherwise vLLM would also prepare expert layers for adapters, which
    fails on CPUs. Only the last part of each name is given: PEFT writes full paths for `all-linear`, from which vLLM
    would find only the unfused layers.
    """
    names = sorted({module.rpartition(".")[2] for module in policy.adapter_modules})
    rank = vllm_lora_rank(policy.adapter["r"])
    return {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": names}


def vllm_lora_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that is at least `rank`."""
    return next(allowed for allowed in LORA_RANKS if allowed >= rank)


def cpu_arguments(policy: Policy, engine: EngineSettings, longest: int) -> dict[str, Any]:
    """Arguments for engines on CPUs only, for sequences of at most `longest` tokens."""
    given: dict[str, Any] = {
        "enforce_eager": True,
        # For a prompt split over two steps vLLM resets the random generator, which it cannot do on CPUs.
        "enable_chunked_prefill": False,
        "max_num_seqs": CPU_MAX_SEQS,
        "kv_cache_memory_bytes": cache_bytes(policy.dimensions, engine, longest),
    }
    if policy.is_recurrent:  # without chunked prefill, vLLM cannot keep states for shared prefixes
        given["enable_prefix_caching"] = False
    return given


def cache_bytes(dims: ModelDims | None, engine: EngineSettings, longest: int) -> int:
    """Size of the KV cache on CPUs in bytes.

    vLLM fills the whole cache with zeros when it starts, so it is as large as a full batch of the longest sequences,
    plus a quarter for prompts that several sequences share. Its limit, `vllm.kv_cache_gib`, is also the size for a
    model whose dimensions are unknown.
    """
    most = engine.kv_cache_gib * 2**30
    if dims is None:
        return most
    tokens = CPU_MAX_SEQS * -(-longest // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE
    return min(most, tokens * dims.cached(engine.dtype) * 5 // 4)


class VisibleGpu(NamedTuple):
    """A GPU as vLLM sees it."""

    memory: float
    """GPU memory in bytes."""
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


def visible_gpu(parallel: int) -> VisibleGpu:
    """The first GPU of this process. With several GPUs, vLLM forks processes, so CUDA must not start here."""
    from vllm.platforms import current_platform

    if parallel > 1:
        return VisibleGpu(current_platform.get_device_total_memory(), current_platform.get_device_name())
    import torch

    facts = torch.cuda.get_device_properties(0)  # correct for a MIG slice, too
    return VisibleGpu(facts.total_memory, facts.name)


def gpu_budget(
    dims: ModelDims, engine: EngineSettings, card: VisibleGpu, longest: int, recurrent: bool = False, kept: bool = True
) -> GpuBudget:
    """Divides vLLM's share of a GPU.

    The cache gets 1.25 times the size of a full batch of the longest sequences, if there is room. So vLLM need not
    measure memory, which would go wrong if other processes on the GPU start or end meanwhile.

    Args:
        dims: the model's dimensions.
        engine: settings; `gpu_memory_utilization` is an upper limit.
        card: the GPU.
        longest: maximum number of tokens of a prompt with its completion.
        recurrent: True if layers have recurrent states, whose blocks differ in size; the cache then gets all the room.
        kept: False for an engine that no worker keeps; the sampler's worker may then hold one on this GPU, too.

    Returns:
        The budget; its cache is 0 or less if there is no room for one.
    """
    size, parallel = BYTES[engine.dtype], engine.tensor_parallel_size
    widths = dims._asdict()
    per_token = sum(multiple * widths[name] for name, multiple in LIVE.items()) * size
    logits = LOGITS * 4 * card.sequences * dims.vocabulary
    share = min(
        card.memory * engine.gpu_memory_utilization, card.memory - devices.idle_bytes("sampler" if kept else "")
    )
    fixed = GpuBudget(
        devices.IDLE["sampler"],
        dims.in_sampler(engine.dtype, engine.quantization is not None) / parallel,
        (card.tokens * per_token + logits) / parallel,
        0,
    )
    tokens = card.sequences * -(-longest // GPU_BLOCK_SIZE) * GPU_BLOCK_SIZE
    most = float("inf") if recurrent else tokens * dims.cached(engine.dtype) * 5 / 4
    return fixed._replace(cache=int(min(share - fixed.total, most)))


def gpu_arguments(
    policy: Policy, engine: EngineSettings, card: VisibleGpu, longest: int, kept: bool = True
) -> dict[str, Any]:
    """Arguments for engines on GPUs only; takes those of `gpu_budget`.

    With `kv_cache_memory_bytes`, vLLM does not measure memory, which fails while other processes on the GPU start or
    end; it then only requires that `gpu_memory_utilization` is free when it starts. If config.json lacks the sizes that
    the budget needs, vLLM measures after all.

    Raises:
        UserError: the cache cannot hold a sequence.
    """
    dims, utilization, parallel = policy.dimensions, engine.gpu_memory_utilization, engine.tensor_parallel_size
    batch = {
        "max_num_seqs": card.sequences,
        # for a MIG slice, vLLM would take the number for the whole GPU
        "max_num_batched_tokens": min(card.tokens, card.sequences * longest),
    }
    if dims is None:
        return batch | {"gpu_memory_utilization": utilization}
    budget = gpu_budget(dims, engine, card, longest, policy.is_recurrent, kept)
    if budget.cache < (needed := dims.cached(engine.dtype) * longest / parallel):
        raise UserError(
            f"vllm.gpu_memory_utilization: {utilization} of a GPU of {card.memory / GB:.1f} GB is too little: the "
            f"weights take {budget.weights / GB:.1f} GB, vLLM and its activations "
            f"{(budget.engine + budget.activations) / GB:.1f} GB, and the KV cache of one sequence of {longest} tokens "
            f"{needed / GB:.2f} GB; raise it, split the model (vllm.tensor_parallel_size), or lower "
            "rollout.max_completion_length"
        )
    return batch | {
        "kv_cache_memory_bytes": budget.cache,
        "gpu_memory_utilization": min(1.0, budget.total / card.memory),
    }
