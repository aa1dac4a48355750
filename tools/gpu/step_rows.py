"""A row about one optimizer step, by tools/bench/gpu.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import machine
from rows import Figures, RowError

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"
PROMPTS, MICRO = 16, 16


def step(folder: Path, size: str, sides: Sequence[str] = ("plain", "deepspeed", "trl")) -> Figures:
    """Tokens/s, share of the card's peak and memory of each side.

    Args:
        folder: an empty folder for the row's files.
        size: model size; `tiny` is measured on a CPU.
        sides: ours without and with DeepSpeed, and TRL's.

    Raises:
        RowError: a side was left out.
    """
    on_cpu = ["--device", "cpu", "--dtype", "float32", "--steps", "1"] if size == "tiny" else []
    counts = [4, 4] if size == "tiny" else [PROMPTS, MICRO]
    call = [sys.executable, SCRIPT, "--sizes", size, "--sides", *sides, "--output", folder / "step.json", *on_cpu]
    machine.command([*call, "--prompts", counts[0], "--micro", counts[1]], folder)
    rows, figures, left_out = json.loads((folder / "step.json").read_text())[size], Figures(), []
    for side, row in rows.items():
        if "left_out" in row:
            left_out.append(f"{side} was left out: {row['left_out']}")
            continue
        figures[f"{side} tokens/s"] = round(row["tokens_per_s"]["value"])
        figures[f"{side} share of peak"] = round(row["model_flops_utilisation"], 3)
        figures[f"{side} GB"] = round(row["peak_memory_gb"], 1)
    if left_out:
        raise RowError("; ".join(left_out), figures)
    return figures
