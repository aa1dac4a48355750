"""Peak memory of a rank that shares a model with others (ZeRO 3), against one process that holds all of it.

An update of 300 million weights in bfloat16: the policy is loaded, trained for a step, and written.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import shapes

from rloo_pipeline.artifacts.policy import Policy

SHAPE = shapes.Shape(32_768, 1024, 21, 2, (20, 40), (20, 40), 1)
WORLD = 4


def split(_: int, folder: Path, __: argparse.Namespace) -> dict[str, list[float]]:
    """Peak memory of a rank of four, against that of one process: 300 million weights in bfloat16, ZeRO 3."""
    subprocess.run([sys.executable, __file__, "model", folder / "model"], check=True)
    one, four = (peak(folder, world) for world in (1, WORLD))
    return {"split_peak_memory_4_vs_1": [four / one]}


def peak(folder: Path, world: int) -> float:
    """Bytes of the largest resident set of any rank."""
    output = folder / f"world-{world}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    subprocess.run([*launcher, __file__, "rank", folder / "model", output], check=True)
    return max(float(file.read_text()) for file in folder.glob(f"{output.name}.*"))


def rank(model: Path, output: Path) -> None:
    """Trains one step as a rank and writes the policy; the rank's peak goes to OUTPUT.RANK."""
    import torch

    from rloo_pipeline.training.engine import Engine
    from rloo_pipeline.training.packing import Sequences

    torch.set_num_threads(1)
    settings = shapes.settings(1e-4, dtype="bfloat16", zero_stage=3, gradient_checkpointing=True)
    engine = Engine(Policy(model), settings, 0)
    prompts, completions, rewards = shapes.batch(SHAPE)
    sequences = Sequences([prompts[row // shapes.K] for row in range(len(completions))], completions)

    def loss_of(rows: Sequence[int], logps: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return -((logps * mask).sum(-1) * torch.tensor([rewards[row] for row in rows])).sum()

    engine.step(sequences, range(len(completions)), 128, loss_of, lambda _: None)
    engine.save_policy(output)
    Path(f"{output}.{engine.rank.number}").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    engine.close()


if __name__ == "__main__":  # split.py model FOLDER | split.py rank MODEL OUTPUT
    if sys.argv[1] == "model":
        import torch

        torch.set_default_dtype(torch.bfloat16)
        shapes.model(SHAPE, Path(sys.argv[2]))
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        rank(Path(sys.argv[2]), Path(sys.argv[3]))
