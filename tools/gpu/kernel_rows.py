"""A row about the kernels of training/faster_kernels.py: whether each passes its check, for several types of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rows import Figures, RowError

KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2")


def compare(folder: Path, device: str, kinds: Sequence[str] = KINDS) -> Figures:
    """Checks each kernel with each type of model; on a CPU, where they do not run, the check alone.

    Raises:
        RowError: a kernel that covers a type fails its check.
    """
    del folder
    from transformers import AutoConfig

    from rloo_pipeline.training import faster_kernels, self_check

    kernels = faster_kernels.KERNELS if device == "cuda" else {"nothing": lambda _: None}
    figures, problems = Figures(), list[str]()
    for kind in kinds:
        config = AutoConfig.for_model(kind)
        checked = self_check.run(config, trust_remote_code=False)
        for name, use in kernels.items():
            why = faster_kernels.problem(use, config, False, checked, device)
            figures[f"{kind}, {name}"] = "failed" if why else "passed"
            problems += [f"{kind}, {name}: {why}"] if why else []
    if problems:
        raise RowError("; ".join(problems), figures)
    return figures
