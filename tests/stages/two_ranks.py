"""Optimizer steps in bfloat16 on two ranks (`torchrun two_ranks.py MODEL OUTPUT`) or, without torchrun, on one.

Writes gradient norms and the weights after the steps to OUTPUT, by ZeRO stage and dtype of communication.
"""

import sys
from pathlib import Path

import torch
from split_ranks import step
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training.engine import Engine

STEPS = 2
CASES = [(1, "float32"), (2, "float32"), (3, "float32"), (1, "model")]


def steps(model: Path, zero_stage: int, communication: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps on rows that are one micro-batch each, so that ranks only divide them among themselves."""
    formats = {"dtype": "bfloat16", "communication_data_type": communication}
    engine = Engine(Policy(model), trainer_settings(1e-2, zero_stage=zero_stage, **formats), 0)
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
