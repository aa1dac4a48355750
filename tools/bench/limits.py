"""Compares an update and a decoding step with the limits of this machine: `limits.py update|rollout FOLDER REPEATS`.

`update` prints {"update_gemm_share": [...]}: the seconds that the matrix products of an optimizer step take when
`torch.matmul` computes them alone, over the seconds of the step. `rollout` prints {"rollout_bandwidth_share": [...]}:
the bytes of weights and key-value cache that a decoding step has to read, over its seconds, over the bytes a second
that a sum over a large tensor reads. Both take the larger shape, float32 and one thread; seconds are of the CPU.
`update` also prints the share of each operation in a step's time, {"update_step_share/OPERATION": [...]}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shapes
import step

from rloo_pipeline.artifacts.policy import Policy

SHAPE = shapes.SHAPES["large"]
Product = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shape and strides of the left matrix, then of the right one."""


def update(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Matrix products alone against whole steps, in turns."""
    import torch

    side = step.OurSide(SHAPE, folder)
    engine = side.start()
    batch = side.batch(engine, torch.zeros(side.mask.shape))

    def take_step() -> None:
        side.update(engine, batch)

    take_step()
    with _products() as products:
        take_step()
    pairs = [(_alone(products), _cpu_seconds(take_step)) for _ in range(repeats)]
    shares = _shares(take_step)
    engine.close()
    return {"update_gemm_share": [alone / whole for alone, whole in pairs], **shares}


@contextmanager
def _products() -> Iterator[Counter[Product]]:
    """Counts the matrix products that are computed inside, by shape and layout."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products: Counter[Product] = Counter()
    first = {torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.baddbmm: 1}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            place = first.get(function.overloadpacket)
            if place is not None:
                left, right = arguments[place : place + 2]
                products[tuple(left.shape), left.stride(), tuple(right.shape), right.stride()] += 1
            return function(*arguments, **(keywords or {}))

    with Mode():  # type: ignore[no-untyped-call]
        yield products


def _alone(products: Counter[Product]) -> float:
    """CPU seconds of these products: each kind is computed twice, and the second counts."""
    import torch

    seconds = 0.0
    for (left_shape, left_stride, right_shape, right_stride), count in products.items():
        left = torch.empty_strided(left_shape, left_stride).normal_()
        right = torch.empty_strided(right_shape, right_stride).normal_()
        torch.matmul(left, right)
        seconds += count * _cpu_seconds(lambda left=left, right=right: torch.matmul(left, right))  # type: ignore[misc]
    return seconds


def _shares(take_step: Callable[[], object]) -> dict[str, list[float]]:
    """The share of a step's CPU time by operation, from 1% on."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        take_step()
    events = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    shares = {event.key: event.self_cpu_time_total / total for event in events}
    return {f"{shapes.STEP}{name}": [share] for name, share in shares.items() if share > 0.01}


def rollout(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Decoding steps of vLLM against reading as many bytes."""
    import torch

    from rloo_pipeline.runtime import environment

    environment.use_threads(1)
    from transformers import AutoConfig
    from vllm import SamplingParams, TokensPrompt

    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.sampler import Sampler

    sampler = Sampler(Policy(folder), EngineSettings("float32", 0.5, 1, 1), 1024, 0)
    llm = sampler.llm
    assert llm is not None
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in shapes.batch(SHAPE)[0] for _ in range(shapes.K)]
    tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)
        return _cpu_seconds(lambda: llm.generate(prompts, params, use_tqdm=False))

    config = AutoConfig.from_pretrained(folder)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    short, long = 8, 72
    cached = tokens + len(prompts) * (short + long) / 2
    width = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    memory = torch.ones(2**28)
    seconds(short)
    shares = []
    for _ in range(repeats):
        of_step = (seconds(long) - seconds(short)) / (long - short)
        bandwidth = 4 * memory.numel() / statistics.median(_cpu_seconds(memory.sum) for _ in range(5))
        shares.append((weights + cached * width) / of_step / bandwidth)
    return {"rollout_bandwidth_share": shares}


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    print(json.dumps({"update": update, "rollout": rollout}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
