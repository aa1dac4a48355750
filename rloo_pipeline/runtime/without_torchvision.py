"""Lets processors of images work without torchvision, as with PyTorch's CPU build from PyPI.

Qwen-VL's processors in transformers need torchvision for videos only. Images are processed by those on PIL then. If
torchvision is installed, this module changes nothing. For vLLM see `rollout/vllm_import.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rloo_pipeline.runtime import guard

PROCESSORS = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Classes of transformers whose video processor needs torchvision."""


def is_missing() -> bool:
    """True if torchvision cannot be used."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_v2_available()  # transformers remember both answers
    return not import_utils.is_torchvision_available()


def prepare_processors() -> None:
    """Makes transformers load the processors of PROCESSORS without their video part."""
    if not is_missing():
        return
    guard.require("transformers")
    import transformers

    for name in PROCESSORS:
        processor: Any = getattr(transformers, name)
        processor.get_attributes = classmethod(lambda _: ["image_processor", "tokenizer"])
        processor.video_processor = property(_no_videos)


def _no_videos(processor: Any) -> SimpleNamespace:
    """A stand-in for the video processor, which vLLM reads though no prompt has a video."""
    from transformers.processing_utils import VideosKwargs

    images = processor.image_processor
    names = ("size", "patch_size", "temporal_patch_size", "merge_size")
    return SimpleNamespace(valid_kwargs=VideosKwargs, **{name: getattr(images, name) for name in names})
