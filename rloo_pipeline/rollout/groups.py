"""K samples a prompt: seeds in, rows of the rollouts table out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import policy
from rloo_pipeline.config import Config, Model, Rollout
from rloo_pipeline.rollout.completions import Request, SamplingConfig
from rloo_pipeline.rollout.sampler import LOGPROBS_MODE, Engine, Sampler, kind_of
from rloo_pipeline.runtime import devices
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import formats
from rloo_pipeline.workers import engine_cache


def load_sampler(folder: Path, config: Config, longest_prompt: int, max_completion_length: int) -> Sampler:
    """A sampler for a policy, whose context is as long as prompts and completions need; one that is kept takes the
    policy's weights.
    """
    model, vllm = config.model, config.vllm
    engine = Engine(
        model.dtype, model.trust_remote_code, vllm.gpu_memory_utilization, vllm.kv_cache_gib, vllm.tensor_parallel_size
    )
    needed = longest_prompt + max_completion_length
    policy.check(folder)
    key = (engine, config.seed, kind_of(folder, model.trust_remote_code))
    sampler: Sampler | None = engine_cache.take("sampler", key)
    if sampler is None:
        if model.dtype == "float16" and not devices.has_gpu():  # bfloat16 is for any CPU, and of a GPU vLLM asks
            formats.refuse(model.dtype)
        sampler = Sampler(folder, engine, needed, config.seed)
    else:
        sampler.swap(folder, needed)
    engine_cache.keep("sampler", key, sampler)
    return sampler


def sampling_config_of(rollout: Rollout) -> SamplingConfig:
    """The rollouts' way of sampling."""
    return SamplingConfig(
        rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.max_completion_length
    )


def facts(model: Model, decoding: SamplingConfig) -> dict[str, object]:
    """What a footer tells of how its samples were drawn."""
    return {
        "dtype": model.dtype,
        "logprobs_mode": LOGPROBS_MODE,
        **{f"sampling_{k}": v for k, v in decoding._asdict().items()},
    }


def sample_groups(
    sampler: Sampler,
    rows: Sequence[dict[str, Any]],
    samples: int,
    decoding: SamplingConfig,
    seed: int,
    names: tuple[str | int, ...],
) -> list[dict[str, Any]]:
    """Rows of the rollouts table: `samples` completions of each prompt, neighbours in order.

    Args:
        sampler: holds the policy.
        rows: prompts with prompt_id and prompt_ids.
        samples: K.
        decoding: how to sample.
        seed, names: each sample's seed is derived from these, its prompt_id and its number.
    """
    asked = list(product(rows, range(samples)))
    requests = [Request(row["prompt_ids"], derive(seed, *names, row["prompt_id"], sample)) for row, sample in asked]
    return [
        {
            "prompt_id": row["prompt_id"],
            "sample": sample,
            "prompt_ids": row["prompt_ids"],
            "completion_ids": completion.ids,
            "completion": completion.text,
            "sampling_logps": completion.logps,
            "finish_reason": completion.finish_reason,
            "seed": request.seed,
        }
        for (row, sample), request, completion in zip(
            asked, requests, sampler.sample(requests, decoding, "completions"), strict=True
        )
    ]
