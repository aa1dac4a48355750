"""Imports without what they take in where they find it and no stage has a use for.

transformers takes in scikit-learn for a curve of assisted generation and SciPy for losses of object detection,
DeepSpeed takes in MLflow for its tuner, pyarrow takes in pandas before its first array: seconds of every stage's start.
They do without where they do not find them, so they do not find them. What a user's code or a later import asks for is
there as ever. vLLM compares each sampled token with its whole vocabulary for a rank that nobody here reads, and has
PyTorch compile that: 3 s of every engine's start, and a C++ compiler on every node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def deepspeed() -> ModuleType:
    """DeepSpeed."""
    with unseen("mlflow"):
        return import_module("deepspeed")


def before_transformers() -> None:
    """Has transformers look for what it is not to find, which it does once; before any of its models is imported."""
    with unseen("sklearn", "scipy"):
        from transformers.utils import import_utils

        import_utils.is_sklearn_available()
        import_utils.is_scipy_available()


def before_arrow() -> None:
    """Has pyarrow look for pandas, which it does at its first array; where somebody converts, it looks again."""
    import pyarrow

    class Hides:
        """A finder: of what is None in sys.modules, as `unseen` has it, compiled code would take the None."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Hides)
    try:
        pyarrow.array([0])
    finally:
        sys.meta_path.remove(Hides)


def vllm() -> ModuleType:
    """vLLM in this process, with ranks of 0."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import_module("vllm.v1.sample.sampler").batched_count_greater_than = _no_ranks  # type: ignore[attr-defined]
    return import_module("vllm")


def _no_ranks(logps: Tensor, _: Tensor) -> Tensor:
    """Args: [tokens, vocabulary], and the log-probs [tokens, 1] to be ranked among them."""
    return logps.new_zeros(logps.shape[0]).long()


@contextmanager
def unseen(*names: str) -> Iterator[None]:
    """A block in which imports do not find these packages, but for those that are imported already."""
    hidden: dict[str, ModuleType] = {}
    for name in names:
        if name not in sys.modules:
            sys.modules[name] = hidden[name] = None  # type: ignore[assignment]  # the import system: not to be found
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
