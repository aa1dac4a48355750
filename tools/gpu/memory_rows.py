"""A row that compares the memory which `rloo plan` predicts for an update with what the update takes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import machine
import whole
from rows import Figures, RowError

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.runtime import devices

WITHIN = {"cpu": 0.15, "cuda": 0.3}
"""Largest relative difference from the measured memory."""
LARGE: dict[str, dict[str, int]] = {
    "0.2B": {"hidden_size": 1024, "layers": 12, "heads": 16, "key_value_heads": 8, "intermediate_size": 3072},
    "0.8B": {"hidden_size": 2048, "layers": 14, "heads": 32, "key_value_heads": 8, "intermediate_size": 6144},
    "1.7B": {"hidden_size": 2048, "layers": 28, "heads": 32, "key_value_heads": 8, "intermediate_size": 6144},
}


def update(folder: Path, device: str, sizes: tuple[str, ...] = tuple(LARGE)) -> Figures:
    """GB predicted and measured of a first update, model by model.

    Args:
        folder: an empty folder for the row's files.
        device: cuda: NVML's memory of the card; cpu: the memory of the process, without pages of files.
        sizes: model sizes.

    Raises:
        RowError: a prediction is off by more than `WITHIN`.
    """
    cases: Any = import_module("test_plan_memory")
    cases.SIZES.update(LARGE)
    figures, off = Figures(), []
    for size in sizes:
        predicted, measured = _one(cases, folder / size, size, device)
        figures |= {f"{size} predicted GB": round(predicted / 1e9, 2), f"{size} measured GB": round(measured / 1e9, 2)}
        if abs(predicted - measured) > WITHIN[device] * measured:
            off.append(f"{size}: predicted {predicted / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB")
    if off:
        raise RowError("; ".join(off), figures)
    return figures


def _one(cases: Any, folder: Path, size: str, device: str) -> tuple[float, float]:
    from rloo_pipeline.before_run import memory
    from rloo_pipeline.config.loading import load

    model = cases.make_model(folder / "model", size)
    on_gpu = {"model": {"dtype": "bfloat16"}, "algorithm": {"steps_per_generation": 1, "old_logps": "trainer"}}
    run = cases.FullRound(folder / "run", model, **(cases.CHANGES | (on_gpu if device == "cuda" else {})))
    config = load(run.run / "config.yaml")
    dimensions = Policy(model).dimensions
    assert dimensions is not None
    terms = memory.RunMemory(config, dimensions, device).update(first=True)
    arguments = run.write(1).update_arguments(1)
    if device == "cpu":
        return memory.total(terms), cases.peak_of(*arguments)
    return memory.total(terms), _peak_on_gpu(arguments)


def _peak_on_gpu(arguments: tuple[object, ...]) -> float:
    """Bytes that a stage takes on the card at most, beyond what was taken before; read ten times a second."""
    before = _taken()
    with whole.watching(_taken) as taken:
        machine.command([sys.executable, "-m", "rloo_pipeline", *arguments])
    return max(taken) - before


def _taken() -> float:
    """Bytes taken on the first card."""
    return float(devices.gpu_facts("memory.used")[0]) * 2**20
