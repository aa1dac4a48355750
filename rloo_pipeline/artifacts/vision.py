"""Which models take images, the tokens that stand for an image, and the processor that comes with such a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.policy import base_of
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.runtime import import_shims, without_torchvision

IMAGE_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""Values of `model_type` in config.json; tests/stages/test_images.py runs each of them."""


def takes_images(hf_config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model in IMAGE_MODELS."""
    return hf_config.get("model_type") in IMAGE_MODELS


def placeholder_ids(hf_config: Mapping[str, Any]) -> list[int]:
    """Ids that stand for a part of an image or video; no model samples them, since nothing would stand behind them."""
    if not takes_images(hf_config):
        return []
    return [int(hf_config[name]) for name in ("image_token_id", "video_token_id")]


def load_processor(folder: Path, trust_remote_code: bool) -> Any:
    """Loads the processor of a policy, which prepares text and images as vLLM's does.

    Raises:
        UserError: the folder has none.
    """
    import_shims.prepare_transformers()
    without_torchvision.prepare_processors()
    from transformers import AutoProcessor

    try:
        processor: Any = AutoProcessor.from_pretrained(base_of(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: no processor of images can be loaded ({one_line(error)}); add the "
            "preprocessor_config.json that belongs to the model"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UserError(f"{folder}: has no preprocessor_config.json of images; add the one that belongs to the model")
    return processor
