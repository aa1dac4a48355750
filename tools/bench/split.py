"""Ranks that share a model (ZeRO 3) against one process that holds all of it: peak memory, and seconds of its files.

An update of 300 million weights in bfloat16: the policy is loaded, trained for a step, and written, in files of 50 MB
so that each rank has some.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shapes

from rloo_pipeline.artifacts.policy import Policy

SHAPE = shapes.Shape(32_768, 1024, 21, 2, (20, 40), (20, 40), 1)
WORLDS = (1, 2, 4)
FILE = 50_000_000
"""Bytes of a weights file."""


class Measured(NamedTuple):
    """A rank, or the largest values of all ranks."""

    peak: float
    """Bytes of the resident set."""
    read: float
    """Seconds in which the policy is loaded."""
    written: float
    """Seconds in which it is written."""


def split(_: int, folder: Path, __: argparse.Namespace) -> dict[str, list[float]]:
    """Peak memory of a rank of four against one process, and seconds per GB of policy: 300 million weights, ZeRO 3."""
    subprocess.run([sys.executable, __file__, "model", folder / "model"], check=True)
    size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors")) / 1e9
    measured = {world: run(folder, world) for world in WORLDS}
    figures = {"split_peak_memory_4_vs_1": [measured[4].peak / measured[1].peak]}
    for world, each in measured.items():
        figures |= {f"split_read_seconds_{world}": [each.read / size]}
        figures |= {f"split_write_seconds_{world}": [each.written / size]}
    return figures


def run(folder: Path, world: int) -> Measured:
    """An update on so many ranks."""
    output = folder / f"world-{world}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    subprocess.run([*launcher, __file__, "rank", folder / "model", output], check=True)
    of_ranks = (map(float, file.read_text().split()) for file in folder.glob(f"{output.name}.*"))
    return Measured(*map(max, zip(*of_ranks, strict=True)))


def rank(model: Path, output: Path) -> None:
    """Trains one step as a rank and writes the policy; what was measured goes to OUTPUT.RANK."""
    import torch

    from rloo_pipeline.training import weight_files
    from rloo_pipeline.training.engine import Engine
    from rloo_pipeline.training.packing import Sequences

    torch.set_num_threads(1)
    keys = {"zero_stage": 3, "gradient_checkpointing": True, "max_tokens_per_micro_batch": 128}
    settings = shapes.settings(1e-4, dtype="bfloat16", **keys)
    weight_files.SHARD = FILE
    read = 0.0

    class Timed(Engine):
        def load(self, *arguments: Any) -> Any:
            nonlocal read
            began = time.monotonic()
            loaded = super().load(*arguments)
            read = time.monotonic() - began
            return loaded

    engine = Timed(Policy(model), settings, 0)
    prompts, completions, rewards = shapes.batch(SHAPE)
    sequences = Sequences([prompts[row // shapes.K] for row in range(len(completions))], completions)

    def loss_of(rows: Sequence[int], logps: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return -((logps * mask).sum(-1) * torch.tensor([rewards[row] for row in rows])).sum()

    engine.step(sequences, range(len(completions)), loss_of)
    began = time.monotonic()
    engine.save_policy(output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(f"{output}.{engine.rank.number}").write_text(f"{peak} {read} {time.monotonic() - began}")
    engine.close()


if __name__ == "__main__":  # split.py model FOLDER | split.py rank MODEL OUTPUT
    if sys.argv[1] == "model":
        import torch

        torch.set_default_dtype(torch.bfloat16)
        shapes.model(SHAPE, Path(sys.argv[2]))
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        rank(Path(sys.argv[2]), Path(sys.argv[3]))
