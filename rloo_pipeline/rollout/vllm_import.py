"""Imports vLLM without ranks of tokens, and its image models without torchvision.

vLLM ranks each sampled token within the vocabulary, which nothing here reads, and compiles that code with PyTorch. This
takes 3 s at each engine start, and needs a C++ compiler on every node. `import_vllm` replaces the ranks with zeros.

vLLM imports modules that import torchvision: for one function on sizes (Qwen-VL), or for the name of a class (Gemma 3).
Where torchvision is missing, `register` imports them with empty modules in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rloo_pipeline.runtime import guard
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.transformers_internals import optional_parts

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_MODULES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
}
"""vLLM's modules of image models, by architecture."""
TORCHVISION = [f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def import_vllm() -> ModuleType:
    """Imports vLLM so that an engine in this process reports 0 for the rank of each token.

    Raises:
        UserError: vLLM is not the version whose internals are used in this package.
    """
    guard.require("vllm")
    with announcing("importing vLLM"):
        replace_ranks()
        return import_module("vllm")


def replace_ranks() -> None:
    """Makes vLLM's sampler return zeros for ranks."""
    sampler: Any = import_module("vllm.v1.sample.sampler")
    if sampler.batched_count_greater_than.__module__ != __name__:  # not yet replaced in this process
        sampler.batched_count_greater_than = _no_ranks


def _no_ranks(logps: Tensor, _: Tensor) -> Tensor:
    """Zeros [tokens], in place of the ranks of the sampled log-probs [tokens, 1] among `logps` [tokens, vocabulary]."""
    return logps.new_zeros(logps.shape[0]).long()


def register(architecture: str) -> None:
    """Makes vLLM use an architecture of IMAGE_MODULES from this process; else it would import it in another one."""
    if architecture not in IMAGE_MODULES or not optional_parts.lacks_torchvision():
        return
    optional_parts.prepare_processors()
    with _empty_modules():
        module = import_module(f"vllm.model_executor.models.{IMAGE_MODULES[architecture]}")
    registry: Any = import_module("vllm").ModelRegistry
    registry.register_model(architecture, getattr(module, architecture))


@contextmanager
def _empty_modules() -> Iterator[None]:
    """A block in which torchvision's modules can be imported, but are empty."""
    modules = {name: ModuleType(name) for name in TORCHVISION}
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


def import_engine() -> None:
    """Imports in advance what an engine needs."""
    import_vllm()
    import_module("vllm.entrypoints.llm")
