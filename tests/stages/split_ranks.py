"""ZeRO 3 on several ranks (`torchrun split_ranks.py MODEL OUTPUT STEPS`) or, without torchrun, on one.

Takes some steps, writes the policy to OUTPUT and, from each rank, its peak of memory in bytes to OUTPUT.RANK.
"""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from trainers import trainer_settings, use_micro_batches

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training import forward_only, weight_files
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

ROWS, LENGTH, TOP_K = 8, 24, 3
IDS = torch.randint(4, 20, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
SEQUENCES = Sequences([row[:6] for row in IDS], [row[6:] for row in IDS])


def run(model: Path, output: Path, steps: int) -> Engine:
    """The steps, each of several micro-batches, and the policy."""
    torch.set_num_threads(1)
    engine = Engine(Policy(model), trainer_settings(1e-2, zero_stage=3), 0)
    if engine.rank.world > 1:
        assert all(hasattr(weights, "ds_id") for weights in engine.model.parameters())
    for _ in range(steps):
        step(engine)
    engine.save_policy(output)
    return engine


def step(engine: Engine, tokens: int = LENGTH) -> None:
    """An optimizer step on all rows, of which so many tokens are a micro-batch."""

    def loss_of(rows: Sequence[int], logps: torch.Tensor, mask: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return -((logps * mask).sum(-1) * torch.tensor([1.0 - row % 3 for row in rows], device=logps.device)).sum() / 9

    use_micro_batches(engine, tokens)
    engine.step(SEQUENCES, range(ROWS), loss_of)


def logps(folder: Path, split: bool) -> forward_only.TokenValues:
    """Log-probs, entropies and the likeliest tokens under a policy, several micro-batches, an odd number of them."""
    model = forward_only.load(Policy(folder), "float32", split)
    if split:
        assert all(hasattr(weights, "ds_id") for weights in model.parameters())
    odd_count = Sequences(SEQUENCES.prompts[1:], SEQUENCES.completions[1:])
    module = TokenLogProbs(model, 0.7)
    top = forward_only.score(module, odd_count, LENGTH, "log-probs", top_k=TOP_K)
    values = forward_only.score(module, odd_count, LENGTH, "log-probs", entropies=True)
    top_logps, top_ids = ([row.tolist() for row in rows] for rows in (top.top_logps, top.top_ids))
    return values._replace(top_logps=top_logps, top_ids=top_ids)


if __name__ == "__main__":
    model, output, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    weight_files.SHARD = int(sys.argv[4]) if len(sys.argv) > 4 else weight_files.SHARD
    engine = run(model, output, steps)
    if len(sys.argv) > 4:
        if engine.rank.first:
            time.sleep(0.5)
            Path(f"{output}.checked").touch()
        split_model.start_ranks()
        assert Path(f"{output}.checked").exists(), "no rank loads before all have checked their part of the files"
        values = logps(output, split=True)
        if engine.rank.first:
            torch.save(tuple(values), f"{output}.logps")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(f"{output}.{engine.rank.number}").write_text(str(peak))
