"""Optimizer steps in bfloat16 on two ranks (`torchrun two_ranks.py MODEL OUTPUT`) or, without torchrun, on one.

Writes gradient norms and the weights after the steps to OUTPUT, by ZeRO stage and dtype of communication.
"""

import sys
from pathlib import Path

import torch
from split_ranks import step

from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.learning_rate import LearningRate
from rloo_pipeline.training.settings import TrainerSettings

STEPS = 2
CASES = [(1, "float32"), (2, "float32"), (3, "float32"), (1, "model")]


def steps(model: Path, zero_stage: int, communication: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps on rows that are one micro-batch each, so that ranks only divide them among themselves."""
    learning_rate = LearningRate(1e-2, "constant", 0, 0, 0.0)
    settings = TrainerSettings(
        *("bfloat16", False, 1.0, learning_rate, (0.9, 0.99), 1e-8, 0.0, 1.0, zero_stage, False, None, communication)
    )
    engine = Engine(model, settings, 0)
    norms = []
    for _ in range(STEPS):
        step(engine)
        norms.append(engine.grad_norm)
    return norms, {name: weights.float() for name, weights in engine.weights()}


if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    results = {(stage, dtype): steps(model, stage, dtype) for stage, dtype in CASES}
    if torch.distributed.get_rank() == 0:
        torch.save(results, output)
