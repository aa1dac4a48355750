"""Lets vision-language models run without torchvision, as with PyTorch's CPU build from PyPI.

Qwen-VL's processors need torchvision for videos only. vLLM imports modules that import it: for one function on sizes
(Qwen-VL), or for the name of a class (Gemma 3). Images are processed by transformers' processors on PIL then. Where
torchvision is installed, nothing here acts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from rloo_pipeline.runtime import guard

PROCESSORS = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Classes of transformers whose video processor needs torchvision."""
IN_VLLM = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
}
"""Modules of vLLM's models by architecture."""
MODULES = [f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def _is_missing() -> bool:
    from transformers.utils import import_utils

    import_utils.is_torchvision_v2_available()  # transformers remember both answers
    return not import_utils.is_torchvision_available()


def prepare_processors() -> None:
    """Makes transformers load the processors of PROCESSORS without their video part."""
    if not _is_missing():
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


def register_in_vllm(architecture: str) -> None:
    """Makes vLLM take an architecture of IN_VLLM from this process; otherwise it imports it in another process."""
    if architecture not in IN_VLLM or not _is_missing():
        return
    prepare_processors()
    with _empty_modules():
        module = import_module(f"vllm.model_executor.models.{IN_VLLM[architecture]}")
    registry: Any = import_module("vllm").ModelRegistry
    registry.register_model(architecture, getattr(module, architecture))


@contextmanager
def _empty_modules() -> Iterator[None]:
    """A block in which torchvision's modules can be imported, but have nothing in them."""
    modules = {name: ModuleType(name) for name in MODULES}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
