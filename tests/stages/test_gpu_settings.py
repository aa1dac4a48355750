"""What vLLM does on a GPU with the settings that the sampler gives it, traced in its own code without a GPU."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import forks

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Rollout
from rloo_pipeline.rollout.engine_arguments import VisibleGpu

GIB = 2**30


CARDS = {139.8: "NVIDIA H200", 79.2: "NVIDIA A100-SXM4-80GB", 22.5: "NVIDIA A10", 178.0: "NVIDIA B200"}
"""Memory in GiB, and name."""


def batch_defaults() -> list[tuple[int, int]]:
    """Sequences and tokens of a batch of `vllm.LLM` on each card."""
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    found = []
    for gib, name in CARDS.items():
        arg_utils.current_platform = SimpleNamespace(
            get_device_total_memory=lambda gib=gib: int(gib * GIB),
            get_device_name=lambda name=name: name,
            is_tpu=lambda: False,
            is_cpu=lambda: False,
        )
        tokens, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
        found.append((sequences[UsageContext.LLM_CLASS], tokens[UsageContext.LLM_CLASS]))
    return found


def test_memory_is_computed_for_the_batch_that_vllm_takes() -> None:
    cards = [VisibleGpu(gib * GIB, name) for gib, name in CARDS.items()]
    assert forks.call(batch_defaults) == [(card.sequences, card.tokens) for card in cards]


def started_with(folder: Path) -> dict[str, object]:
    """What a warm sampler on an H200 starts vLLM with."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    from rloo_pipeline.rollout import engine_arguments, engine_process, sampler
    from rloo_pipeline.runtime import devices
    from rloo_pipeline.workers import engine_cache

    given: dict[str, object] = {}
    devices.device_type = lambda: "cuda"
    engine_arguments.visible_gpu = lambda _: VisibleGpu(140 * GIB, "NVIDIA H200")
    vllm.LLM = lambda **settings: given.update(settings)
    engine_process.end_calls_with_engine = lambda _: None  # there is no engine
    engine_cache.enable()
    sampler.Sampler(
        Policy(folder), engine_arguments.EngineSettings("bfloat16", 0.9, 1, 1, 0, True, "fp8_per_tensor"), 100, 7
    )
    EngineArgs(**given, decode_context_parallel_size=1)  # knows all of these names
    return given


def quantized_by() -> dict[str, list[str]]:
    """What vLLM does on loading with each scheme that `rollout.quantization` can name."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.quantization.online.base import _ONLINE_LINEAR_METHODS, _ONLINE_MOE_METHODS

    found = {}
    for name in get_args(get_args(Rollout.model_fields["quantization"].annotation)[0]):
        scheme = resolve_quantization_config(name, None)
        methods = (_ONLINE_LINEAR_METHODS[scheme.linear.weight], _ONLINE_MOE_METHODS[scheme.moe.weight])
        found[name] = [method.__name__ for method in methods]
    return found


def test_each_scheme_quantizes_as_vllm_loads() -> None:
    assert forks.call(quantized_by) == {
        "fp8_per_tensor": ["Fp8PerTensorOnlineLinearMethod", "Fp8PerTensorOnlineMoEMethod"],
        "fp8_per_channel": ["Fp8PtpcOnlineLinearMethod", "Fp8PtpcOnlineMoEMethod"],
        "fp8_per_block": ["Fp8PerBlockOnlineLinearMethod", "Fp8PerBlockOnlineMoEMethod"],
    }


def test_the_sampler_starts_vllm_with_its_share_of_the_gpu(tiny_model) -> None:
    settings = forks.call(started_with, tiny_model)
    share = settings.pop("gpu_memory_utilization")
    assert 0.015 < share < 0.03, "what a full batch of this small model takes, of 0.9"
    assert settings == {
        "model": str(tiny_model),
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": 128,
        "seed": 7,
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "generation_config": "vllm",
        "enable_sleep_mode": True,
        "quantization": "fp8_per_tensor",
        "enable_return_routed_experts": True,
        "async_scheduling": False,
        "scheduler_cls": "rloo_pipeline.rollout.engine_process.scheduler",
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 16384,
        "kv_cache_memory_bytes": settings["kv_cache_memory_bytes"],
    }
    assert settings["kv_cache_memory_bytes"] % (1024 * 128 * 5 // 4) == 0


def measured_with(settings: dict) -> tuple[int, list[str]]:
    """Bytes that a worker of vLLM takes for its cache, and what it does before."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu_worker import Worker

    steps: list[str] = []
    gpu_worker.set_current_vllm_config = contextlib.nullcontext
    gpu_worker.memory_profiling = lambda *_, **__: steps.append("measures")
    worker = SimpleNamespace(
        cache_config=SimpleNamespace(**settings),
        vllm_config=None,
        randomize_dummy_inputs=False,
        init_snapshot=SimpleNamespace(free_memory=GIB),
        model_runner=SimpleNamespace(profile_run=lambda **_: steps.append("compiles")),
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(),
    )
    return Worker.determine_available_memory(worker), steps


def test_with_bytes_vllm_measures_nothing() -> None:
    assert forks.call(measured_with, {"kv_cache_memory_bytes": 5 * GIB}) == (5 * GIB, ["compiles"])


def demanded(free: float, share: float) -> int:
    """Bytes that vLLM demands to be free at its start."""
    from vllm.v1.worker.utils import request_memory

    snapshot = SimpleNamespace(total_memory=140 * GIB, free_memory=free, device_="cuda:0")
    return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))


def test_vllm_demands_that_its_share_is_free() -> None:
    assert forks.call(demanded, 20 * GIB, 0.1) == 14 * GIB


def kept_over_two_steps() -> tuple[list[int], list[list[int]]]:
    """The joined ids and experts of a request that shares the arrays of its steps with another one."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    from rloo_pipeline.rollout.engine_process import KeptTokens

    steps = [np.arange(12, dtype=np.uint8).reshape(6, 1, 2), np.arange(12, 16, dtype=np.uint8).reshape(2, 1, 2)]
    outputs = [
        SimpleNamespace(
            new_token_ids=[7 + number],
            new_logprobs=LogprobsLists(np.array([[7 + number]]), np.array([[-1.0]]), np.array([0])),
            routed_experts=experts[: len(experts) // 2],
            prefill_stats=None,
        )
        for number, experts in enumerate(steps)
    ]
    kept = KeptTokens(outputs[0])
    for output, step in zip(outputs, steps, strict=True):
        kept.add(output)
        step[:] = 99
    kept.join(outputs[-1])
    return outputs[-1].new_token_ids, outputs[-1].routed_experts[:, 0].tolist()


def test_a_request_keeps_its_own_experts_and_not_the_arrays_of_its_steps() -> None:
    assert forks.call(kept_over_two_steps) == ([7, 8], [[0, 1], [2, 3], [4, 5], [12, 13]])
