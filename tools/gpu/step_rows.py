"""A row about one optimizer step, by tools/bench/gpu.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import gpu
import machine
from rows import Figures, RowError

if TYPE_CHECKING:
    from rloo_pipeline.artifacts.model_dims import ModelDims
    from rloo_pipeline.config import Config

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"
PROMPTS, MICRO = 16, 16
TINY, LONGEST = (16, 24), (200, 500)
"""Tokens of the longest prompt and completion in tools/bench/gpu.py."""


def filled(folder: Path, size: str, room: float | None = None, sides: Sequence[str] = ("deepspeed",)) -> Figures:
    """`step` with the micro-batches of `max_tokens_per_micro_batch: auto`, two of them.

    Args:
        folder: an empty folder for the row's files.
        size: as in `step`.
        room: bytes of the card; None asks for them.
        sides: as in `step`.

    Raises:
        RowError: they do not fit, or a side was left out.
    """
    from rloo_pipeline.before_run import checkpointing
    from rloo_pipeline.runtime import devices

    room = devices.training_bytes() if room is None else room
    resolved = checkpointing.resolve_for(config_of(size), dims_of(size), "cuda", room)
    tokens = resolved.deepspeed.micro_batch_tokens
    micro = max(4, tokens // sum(TINY if size == "tiny" else LONGEST))
    return Figures({"tokens a micro-batch": tokens}) | step(folder, size, sides, [micro // 2, micro])


def config_of(size: str) -> Config:
    """The mini configuration with a size's number format, checkpointing and the largest micro-batches."""
    from rloo_pipeline.config.loading import load

    config = load(machine.ROOT / ".test" / "config" / "config.yaml")
    return config.override(
        {
            "model.dtype": "bfloat16",
            "deepspeed.gradient_checkpointing": gpu.SIZES[size].checkpointing,
            "deepspeed.max_tokens_per_micro_batch": "auto",
        }
    )


def dims_of(size: str) -> ModelDims:
    """A size's dimensions."""
    from rloo_pipeline.artifacts.model_dims import ModelDims

    of = gpu.SIZES[size]
    widths = of.heads * of.head_dim, of.key_value_heads * of.head_dim, of.intermediate, of.vocabulary
    head = of.vocabulary * of.hidden * (1 if of.tied else 2)
    return ModelDims(of.hidden, of.layers, *widths, of.layer_weights + head)


def step(
    folder: Path, size: str, sides: Sequence[str] = ("plain", "deepspeed", "trl"), counts: Sequence[int] = ()
) -> Figures:
    """Tokens/s, share of the card's peak and memory of each side.

    Args:
        folder: an empty folder for the row's files.
        size: model size; `tiny` is measured on a CPU.
        sides: names of sides of tools/bench/gpu.py.
        counts: prompts of the step, and sequences of a micro-batch.

    Raises:
        RowError: a side was left out.
    """
    on_cpu = ["--device", "cpu", "--dtype", "float32", "--steps", "1"] if size == "tiny" else []
    counts = counts or ([4, 4] if size == "tiny" else [PROMPTS, MICRO])
    call = [sys.executable, SCRIPT, "--size", size, "--sides", *sides, "--output", folder / "step.json", *on_cpu]
    machine.command([*call, "--prompts", counts[0], "--micro", counts[1]], folder)
    rows, figures, left_out = json.loads((folder / "step.json").read_text()), Figures(), []
    for side, row in rows.items():
        if "left_out" in row:
            left_out.append(f"{side} was left out: {row['left_out']}")
            continue
        figures[f"{side} tokens/s"] = round(row["tokens_per_s"]["value"])
        figures[f"{side} share of peak"] = round(row["model_flops_utilisation"], 3)
        figures[f"{side} GB"] = round(row["peak_memory_gb"], 1)
        if "graphs" in row:
            figures[f"{side} graphs"], figures[f"{side} compilation s"] = row["graphs"], round(row["compilation_s"], 1)
        if side != "fast" and (fast := figures.get("fast tokens/s")):
            figures[f"{side} tokens/s of fast's"] = round(row["tokens_per_s"]["value"] / float(fast), 3)
    if left_out:
        raise RowError("; ".join(left_out), figures)
    return figures
