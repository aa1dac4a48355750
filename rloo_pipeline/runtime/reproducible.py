"""The key `reproducible`: kernels whose sums depend neither on the batch nor on the order of threads.

On CPUs, engines always compute this way. On GPUs, vLLM has slower kernels for it, and torch switches to some of its
own.
"""

import os

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import devices

VARIABLES = {
    "VLLM_BATCH_INVARIANT": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, deterministic mode refuses cuBLAS
    # sums over ranks in one order: one algorithm, and no sums inside the switch
    "NCCL_ALGO": "ring,tree;allreduce:tree",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}
"""Environment variables on GPUs; vLLM's batch invariance sets the NCCL ones, too."""

CARD = "_card"
"""Suffix of the facts `sampler_card`, `logprobs_card` and `trainer_card`, in tables and policies of runs with the key.
"""

_asked: bool | None = None
"""Value of the key in the stages that this process has run."""


def prepare(asked: bool) -> None:
    """Sets the environment variables of the key; call it before an engine is imported.

    Raises:
        IncompatibleEngine: this process has run stages with the other value; the worker then restarts.
    """
    global _asked
    if _asked not in (None, asked):
        raise IncompatibleEngine(f"engines were loaded with reproducible: {_asked}")
    _asked = asked
    if asked and devices.has_gpu():
        os.environ.update(VARIABLES)


def card(asked: bool, role: str) -> dict[str, str]:
    """The fact that names the card of a role's engine on this machine; empty without the key."""
    return {role + CARD: devices.card()} if asked else {}


def use_torch(threads: int, asked: bool) -> None:
    """Sets torch's number of threads, and with the key its deterministic kernels.

    An operation without such a kernel then ends the stage, with torch's error that names it.
    """
    import torch
    import torch.utils.deterministic

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(asked)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module's property
