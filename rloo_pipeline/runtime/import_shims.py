"""Imports engines without their slow optional dependencies, which no stage needs.

transformers imports scikit-learn (assisted generation) and SciPy (losses of object detection), DeepSpeed imports MLflow
(its tuner), pyarrow imports pandas before its first array: seconds at the start of every stage. Each of them works
without the package, so it is hidden during the import. User code and later imports find it as usual.

vLLM ranks each sampled token within the vocabulary, which nobody here reads, and compiles that code with PyTorch: 3 s
at every engine's start, and a C++ compiler on every node. `import_vllm` replaces the ranking by zeros.
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

if TYPE_CHECKING:
    from torch import Tensor


def import_deepspeed() -> ModuleType:
    """Imports DeepSpeed without MLflow.

    Raises:
        UserError: DeepSpeed is not the version whose internals are used in training/.
    """
    guard.require("deepspeed")
    with hidden_packages("mlflow"):
        return import_module("deepspeed")


def prepare_transformers() -> None:
    """Makes transformers cache that scikit-learn and SciPy are missing; call it before importing any of its models."""
    with hidden_packages("sklearn", "scipy"):
        from transformers.utils import import_utils

        import_utils.is_sklearn_available()
        import_utils.is_scipy_available()


def prepare_arrow() -> None:
    """Makes pyarrow create its first array without importing pandas; a conversion to pandas imports it later."""
    import pyarrow

    class Hides:
        """An import hook, since compiled code would take the None that `hidden_packages` puts into sys.modules."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Hides)
    try:
        pyarrow.array([0])
    finally:
        sys.meta_path.remove(Hides)


def import_vllm() -> ModuleType:
    """Imports vLLM so that an engine in this process reports 0 for the rank of each token.

    Raises:
        UserError: vLLM is not the version whose internals are used here and in rollout/.
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


@contextmanager
def hidden_packages(*names: str) -> Iterator[None]:
    """Hides these packages from imports inside the block, unless they are imported already."""
    hidden: dict[str, ModuleType] = {}
    for name in names:
        if name not in sys.modules:
            sys.modules[name] = hidden[name] = None  # type: ignore[assignment]  # the import system: not to be found
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
