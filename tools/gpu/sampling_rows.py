"""A row about vLLM alone: seconds to start, tokens/s, whether a batch changes tokens. Beside it, our sampler."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from rows import Figures, RowError

CONTEXT = 2048
REQUESTS, TOKENS = (512, 1024), (16, 8)
"""Number and length of completions, large and tiny: pairs of (requests, tokens)."""
LEAST = 0.95
"""Smallest share of vLLM's tokens/s that our sampler may have."""


def bare(folder: Path, invariant: bool = False, tiny: bool = False) -> Figures:
    """Two starts of vLLM, the first without a compile cache; the second then samples, and after it our sampler.

    Args:
        folder: an empty folder for the row's files.
        invariant: use kernels that give the same sums for every batch. All tokens must then be equal.
        tiny: use a tiny model and few requests.
    """
    import round_rows
    from task import words_qwen3

    shape = round_rows.configuration(tiny)["model"]["build_options"]
    words_qwen3(folder / "model", 0, **{**shape, "context": CONTEXT})
    variables = {"VLLM_CACHE_ROOT": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
    variables |= {"VLLM_BATCH_INVARIANT": "1"} if invariant else {}
    call = [sys.executable, __file__, folder / "model", *(REQUESTS if not tiny else TOKENS)]
    variables |= {"RLOO_GPU_DTYPE": "float32", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if tiny else {}
    first = {} if invariant or tiny else machine.last_json(machine.command([*call, "start"], folder, **variables))
    figures = machine.last_json(machine.command([*call, "sample"], folder, **variables))
    if not invariant:
        figures |= machine.last_json(machine.command([*call, "ours"], folder, **variables))
        figures["ours by vLLM's"] = round(figures["ours tokens/s"] / figures["tokens/s"], 2)
    starts = {"first start s": first["start s"]} if first else {}
    if not (invariant or tiny) and figures["ours by vLLM's"] < LEAST:
        raise RowError(f"our sampler has less than {LEAST} of vLLM's tokens/s", figures)
    if invariant and not figures["equal again"] == figures["equal in smaller batches"] == figures["requests"]:
        raise RowError("with VLLM_BATCH_INVARIANT=1 completions differ", figures)
    return {**starts, **figures}


def sample(model: Path, requests: int, tokens: int, work: bool) -> Figures:
    """Starts vLLM in this process and samples the same requests three times, the last time in four calls."""
    from vllm import LLM, SamplingParams, TokensPrompt

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    dtype: Any = os.environ.get("RLOO_GPU_DTYPE", "bfloat16")
    rehearsal = "RLOO_GPU_DTYPE" in os.environ
    began = time.monotonic()
    llm = LLM(
        str(model), dtype=dtype, max_model_len=CONTEXT,
        gpu_memory_utilization=0.35, logprobs_mode="processed_logprobs", seed=0,
        enforce_eager=rehearsal,  # on a CPU, compilation takes minutes
        kv_cache_memory_bytes=1 << 28 if rehearsal else None,  # a third of the memory takes a CPU 20 s to fill
    )  # fmt: skip
    figures: Figures = {"start s": round(time.monotonic() - began, 1)}
    prompts = prompts_of(vocabulary, requests)
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]

    def once(size: int, seconds_name: str = "") -> list[list[int]]:
        llm.reset_prefix_cache()
        began, cpu, outputs = time.monotonic(), time.process_time(), []
        for at in range(0, requests, size):
            numbers = range(at, min(at + size, requests))
            params = [SamplingParams(max_tokens=tokens, seed=1000 + n, logprobs=0, detokenize=False) for n in numbers]
            outputs += llm.generate([batch[number] for number in numbers], params, use_tqdm=False)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        if seconds_name:
            figures.update(speed(seconds_name, ids, began, cpu))
        return ids

    if work:
        once(requests)
        first, again, split = once(requests, "tokens/s"), once(requests, "again tokens/s"), once(requests // 4)
        figures["requests"] = requests
        figures["equal again"] = sum(a == b for a, b in zip(first, again, strict=True))
        figures["equal in smaller batches"] = sum(a == b for a, b in zip(first, split, strict=True))
    return figures


def ours(model: Path, requests: int, tokens: int) -> Figures:
    """Has the sampler of the rollout stage sample the same requests four times, as a warm worker does."""
    from rloo_pipeline.artifacts.policy import Policy
    from rloo_pipeline.rollout.engine_arguments import EngineSettings
    from rloo_pipeline.rollout.requests import Request, SamplingConfig
    from rloo_pipeline.rollout.sampler import Sampler

    dtype: Any = os.environ.get("RLOO_GPU_DTYPE", "bfloat16")
    sampler = Sampler(Policy(model), EngineSettings(dtype, 0.35, 1, 1), CONTEXT, 0)
    decoding = SamplingConfig(1.0, 1.0, 0, None, tokens)
    prompts = prompts_of(sampler.probe.vocabulary, requests)
    batch = [Request(ids, 1000 + number, decoding) for number, ids in enumerate(prompts)]
    figures: Figures = {}
    for name in ("", "ours tokens/s", "ours, third round, tokens/s", "ours, fourth round, tokens/s"):
        sampler.llm.reset_prefix_cache() if sampler.llm else None
        began, cpu = time.monotonic(), time.process_time()
        ids = [completion.ids for completion in sampler.sample(batch, "completions")]
        if name:
            figures |= speed(name, ids, began, cpu)
    return figures


def prompts_of(vocabulary: int, requests: int) -> list[list[int]]:
    """The prompt of each request, eight neighbouring ones have the same."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(draw.randint(100, 200))] for _ in range(requests // 8)]
    return [prompts[number // 8] for number in range(requests)]


def speed(name: str, ids: Sequence[Sequence[int]], began: float, cpu: float) -> Figures:
    """Tokens a second since `began`, and the CPU ms of this process for a thousand tokens since `cpu`."""
    tokens = sum(map(len, ids))
    host = (time.process_time() - cpu) * 1e6 / tokens
    return {name: round(tokens / (time.monotonic() - began)), name.replace("tokens/s", "host ms/1,000"): round(host, 2)}


if __name__ == "__main__":
    model, requests, tokens, part = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    figures = ours(model, requests, tokens) if part == "ours" else sample(model, requests, tokens, part == "sample")
    print(json.dumps(figures), flush=True)
