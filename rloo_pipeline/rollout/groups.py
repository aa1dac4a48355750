"""Samples K completions per prompt and returns them as rows of the rollouts table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import policy
from rloo_pipeline.config import Config, Model, Rollout
from rloo_pipeline.rollout.compatibility import compatibility_key
from rloo_pipeline.rollout.requests import Request, SamplingConfig
from rloo_pipeline.rollout.sampler import LOGPROBS_MODE, EngineSettings, Sampler
from rloo_pipeline.runtime import devices
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import formats, plain_model
from rloo_pipeline.workers import engine_cache


def load_sampler(folder: Path, config: Config, longest_prompt: int, max_completion_length: int) -> Sampler:
    """A sampler with the weights of a policy: the one that this worker keeps, else a new one.

    Args:
        folder: of the policy.
        config: of the stage.
        longest_prompt, max_completion_length: tokens that the context must have room for, together.

    Raises:
        UserError: the policy is not complete, or its model or the CPU does not fit the configuration.
        IncompatibleEngine: this worker keeps a sampler that cannot take this policy.
    """
    model, vllm = config.model, config.vllm
    settings = EngineSettings(
        model.dtype, model.trust_remote_code, vllm.gpu_memory_utilization, vllm.kv_cache_gib, vllm.tensor_parallel_size
    )
    needed = longest_prompt + max_completion_length
    policy.check(folder)
    plain_model.check_tensors(folder, model.trust_remote_code)
    key = (settings, config.seed, compatibility_key(folder, model.trust_remote_code))
    sampler: Sampler | None = engine_cache.take("sampler", key)
    if sampler is None:
        if model.dtype == "float16" and not devices.has_gpu():  # any CPU has bfloat16; on a GPU vLLM checks the dtype
            formats.check_dtype(model.dtype)
        sampler = Sampler(folder, settings, needed, config.seed)
    else:
        sampler.swap(folder, needed)
    engine_cache.keep("sampler", key, sampler)
    return sampler


def sampling_config_of(rollout: Rollout) -> SamplingConfig:
    """The sampling parameters of the rollouts."""
    return SamplingConfig(
        rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p, rollout.max_completion_length
    )


def sampling_facts(model: Model, sampling: SamplingConfig) -> dict[str, object]:
    """How samples were drawn, for the footer of their table."""
    return {
        "dtype": model.dtype,
        "logprobs_mode": LOGPROBS_MODE,
        **{f"sampling_{k}": v for k, v in sampling._asdict().items()},
    }


def sample_groups(
    sampler: Sampler,
    rows: Sequence[dict[str, Any]],
    samples: int,
    sampling: SamplingConfig,
    seed: int,
    names: tuple[str | int, ...],
) -> list[dict[str, Any]]:
    """Samples `samples` completions of each prompt.

    Args:
        sampler: with the policy.
        rows: prompts with prompt_id and prompt_ids.
        samples: K.
        sampling: parameters.
        seed, names: the seed of each sample is derived from these, its prompt_id and its index (`seeds.derive`).

    Returns:
        Rows of the rollouts table, ordered by (prompt, sample).
    """
    pairs = list(product(rows, range(samples)))
    requests = [Request(row["prompt_ids"], derive(seed, *names, row["prompt_id"], sample)) for row, sample in pairs]
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
            pairs, requests, sampler.sample(requests, sampling, "completions"), strict=True
        )
    ]
