"""Sizes that a vLLM engine is started with: context, KV cache on CPUs, images of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import model_dims, vision
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import UserError

CPU_MAX_SEQS = 256
"""Largest number of sequences in one batch on CPUs."""
CPU_BLOCK_SIZE = 128
"""Tokens in one block of the KV cache on CPUs."""


def context_length(folder: Path, needed: int) -> int:
    """A context for at least `needed` tokens, rounded up so that a later stage may have somewhat longer prompts.

    Raises:
        UserError: `needed` exceeds the context of the model.
    """
    longest = model_dims.context(read_json(folder / "config.json"))
    if longest is not None and needed > longest:
        raise UserError(
            f"{folder}: the longest prompt and max_completion_length make {needed} tokens, the model's context is "
            f"{longest}; lower dataset.max_prompt_length or rollout.max_completion_length"
        )
    rounded = -(-needed // 64) * 64
    return rounded if longest is None else min(rounded, longest)


def cache_bytes(dims: ModelDims | None, dtype: Dtype, most_gib: int, longest: int) -> int:
    """Size of the KV cache on CPUs in bytes.

    vLLM fills all of the cache with zeros when it starts, so it gets what a full batch of the longest sequences takes,
    and a quarter more for prompts that several sequences share.

    Args:
        dims: of the model; None where they are not known, which gives `most_gib`.
        dtype: of the model.
        most_gib: upper limit in GiB.
        longest: tokens of a prompt and its completion.
    """
    most = most_gib * 2**30
    if dims is None:
        return most
    tokens = CPU_MAX_SEQS * -(-longest // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE
    return min(most, tokens * dims.cached(dtype) * 5 // 4)


def dims_of(folder: Path) -> ModelDims | None:
    """The dimensions of a model; None where its configuration has none that `model_dims` can read."""
    try:
        return model_dims.read(folder)
    except UserError:
        return None


def image_settings(hf_config: dict[str, Any], most: int) -> dict[str, Any]:
    """vLLM's settings for a model of images, by its config.json, whose prompts have at most so many; else none.

    The processor normalizes pixels, as for the trainer: vLLM itself would take mean and deviation from files that may
    lack them.
    """
    if not vision.takes_images(hf_config):
        return {}
    videos = {} if vision.kind_of(hf_config).video is None else {"video": 0}
    return {"limit_mm_per_prompt": {"image": most, **videos}, "mm_device_do_normalize": False}
