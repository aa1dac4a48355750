"""Explains in one sentence why an engine ran out of memory: what it wanted, who holds the memory, what would fit."""

import os

import psutil

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import advice, checkpointing
from rloo_pipeline.before_run.memory import GB, ROOM, RunMemory, Terms, total
from rloo_pipeline.config import Config, Vllm
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.engine_arguments import VisibleGpu
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.devices import GpuProcess

ENGINES = {"sampler": "vLLM", "trainer": "the trainer", "logprobs": "the model for log-probs"}
"""Description of each worker role's engine."""
TEXTS = (
    "out of memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "is less than desired GPU memory utilization",
    "Error in memory profiling",
    "Memory usage increased after sleeping",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
)
"""Phrases in messages of torch, CUDA and vLLM that mean too little memory."""
LESS = 0.05
"""Amount by which to lower `gpu_memory_utilization` if it is too high although nothing else is on the GPU."""


def refuse(error: Exception, role: str, config: Config, policy: Policy | None) -> None:
    """Raises a more helpful error if this one means that an engine found too little memory.

    Args:
        error: exception that ended the stage.
        role: worker role of the stage; a role without an engine is ignored.
        config: the run's configuration.
        policy: the policy or model; None if there are several.

    Raises:
        UserError: memory ran out; the message is that of `sentence`.
    """
    if role not in ENGINES or not is_out_of_memory(error):
        return
    dims = None if policy is None else policy.dimensions
    gpu = _gpu()
    raise UserError(sentence(role, config, dims, gpu, devices.gpu_processes() if gpu else [])) from error


def is_out_of_memory(error: Exception) -> bool:
    """True if the error means that memory ran out."""
    if isinstance(error, UserError):
        return False
    is_named_so = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named_so or any(text in str(error) for text in TEXTS)


def _gpu() -> VisibleGpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return VisibleGpu(facts.total_memory, facts.name)


def sentence(
    role: str, config: Config, dims: ModelDims | None, gpu: VisibleGpu | None, holders: list[GpuProcess]
) -> str:
    """Builds the error message for the user.

    Args:
        role: worker role of the engine.
        config: the run's configuration.
        dims: the model's dimensions; None if unknown.
        gpu: the GPU; None on CPUs.
        holders: processes that hold memory of the GPU, including this one.
    """
    if role == "trainer" and gpu is not None and dims is not None:  # the number that `auto` stood for
        config = checkpointing.resolve_for(config, dims, "cuda", devices.left_for_training(gpu.memory))
    room = devices.machine_bytes() if gpu is None else gpu.memory
    place = "this machine or job" if gpu is None else f"the GPU ({gpu.name})"
    parts = [f"out of memory: {place} has {room / GB:.1f} GB"]
    if dims is not None:
        terms = _terms(role, config, dims, gpu)
        listed = ", ".join(f"{name} {size / GB:.1f}" for name, size in terms.items() if size >= 0.05 * GB)
        parts.append(f"{ENGINES[role]} wanted about {total(terms) / GB:.1f} GB ({listed or 'process'})")
    if holders:
        parts.append("now " + ", ".join(f"{one.name} holds {one.used / GB:.1f} GB" for one in holders))
    # vLLM's engine is a child process
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    others = sum(one.used for one in holders if one.pid not in own)
    ends = "end the other processes, or " if others else ""
    if role == "sampler":
        parts.append(ends + _sampler_fits(config.vllm, gpu, others))
    else:
        parts.append(ends + _trainer_fits(role, config, dims, gpu, others))
    return "; ".join(parts)


def _terms(role: str, config: Config, dims: ModelDims, gpu: VisibleGpu | None) -> Terms:
    of_run = RunMemory(config, dims, "cpu" if gpu is None else "cuda")
    if role == "sampler":
        return of_run.rollout(gpu)
    return of_run.reference() if role == "logprobs" else of_run.update()


def _sampler_fits(vllm: Vllm, gpu: VisibleGpu | None, others: float) -> str:
    if gpu is None:
        return f"lower vllm.kv_cache_gib ({vllm.kv_cache_gib}), or give the job more memory"
    set_to = vllm.gpu_memory_utilization
    fits = int(min((gpu.memory - others) / gpu.memory, set_to) * 100 - 100 * LESS) / 100
    if fits <= 0:
        return "use another GPU"
    return f"set vllm.gpu_memory_utilization: {fits} ({set_to} now), or raise vllm.tensor_parallel_size"


def _trainer_fits(role: str, config: Config, dims: ModelDims | None, gpu: VisibleGpu | None, others: float) -> str:
    smaller = f"lower deepspeed.max_tokens_per_micro_batch ({config.deepspeed.micro_batch_tokens})"
    if gpu is None:
        return f"{smaller}, or give the job more memory"
    if dims is None or role == "logprobs":
        return smaller
    return advice.nearest_update(config, dims, (gpu.memory - others) * ROOM)
