"""Optimizer steps whose micro-batches are split over ranks (`torchrun sequence_ranks.py FOLDER OUTPUT CASE…`) or,
without torchrun, on one.

Writes to OUTPUT what each case gives: log-probs, entropies, loss, gradient, statistics and use of experts.
"""

import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Algorithm, Lora, Rollout
from rloo_pipeline.training import forward_only
from rloo_pipeline.training.batch import AlgorithmState, RoundTensors, make_batch
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.objective import Record, StepLoss
from rloo_pipeline.training.packing import Sequences

ADAPTER = {"lora": Lora(r=4, lora_dropout=0.0), "gradient_checkpointing": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense over 4": ("qwen3", 4, {}),
    "dense over 2": ("qwen3", 2, {}),
    "windows, sinks and experts over 4": ("gpt_oss", 4, {}),
    "soft caps over 2": ("gemma2", 2, {}),
    "an adapter over 2": ("qwen3", 2, ADAPTER),
    "split weights over 2": ("qwen3", 2, {"zero_stage": 3, "gradient_checkpointing": True}),
}
"""Kind of model, ranks of a micro-batch, and further settings of the trainer."""
PROMPTS, COMPLETIONS = (9, 21), (150, 3, 40, 1, 61, 7, 2, 30)
"""Lengths; the first four completions share a prompt, and so do the others. The longest has a kernel of its own."""
TOKENS = 170
"""Of a micro-batch: the step has several."""
DRAW = torch.Generator().manual_seed(1)
IDS = [torch.randint(4, 20, (count,), generator=DRAW).tolist() for count in (*PROMPTS, *COMPLETIONS)]
CANDIDATES = [np.tile(np.array([30, 31]), (count, 1)) for count in COMPLETIONS]
SEQUENCES = Sequences([IDS[0]] * 4 + [IDS[1]] * 4, IDS[2:], candidates=CANDIDATES)
ALGORITHM = {
    "importance_sampling_level": "token",
    "loss_agg_mode": "token_mean",
    "kl": {"placement": "loss", "estimator": "k3"},
    "mismatch": {"correction": "token_tis"},
}


def completions_of(old: torch.Tensor) -> RoundTensors:
    """Rewards and log-probs for which every term of the loss matters."""
    lengths, draw = torch.tensor(COMPLETIONS), torch.Generator().manual_seed(2)
    mask = torch.arange(max(COMPLETIONS)) < lengths.unsqueeze(-1)
    noisy = [torch.where(mask, old + 0.1 * torch.randn(old.shape, generator=draw), 0.0) for _ in range(3)]
    scores = torch.tensor([1, 0, 0, 2, 1, 1, 0, 3], dtype=torch.float64)
    return RoundTensors(scores, mask, torch.zeros(8).bool(), *noisy[:2], sampling_logps=noisy[2])


def measured(folder: Path, case: str, split: bool) -> dict[str, Any]:
    """The results of the first step of a case."""
    kind, size, changes = CASES[case]
    settings = trainer_settings(
        temperature=0.8, sequence_parallel=size if split else 1, max_tokens_per_micro_batch=TOKENS, **changes
    )
    engine = Engine(Policy(folder / kind), settings, 0)
    old = engine.logps(SEQUENCES)
    gradients: list[torch.Tensor] = []

    def keep() -> None:
        """Replaces clipping, at which point every rank has the whole gradient."""
        engine.engine._global_grad_norm = 1.0
        gradients.extend(
            weights.grad.flatten().clone().cpu() for weights in engine.model.parameters() if weights.requires_grad
        )

    engine.engine.clip_fp32_gradients = keep
    algorithm = Algorithm(**ALGORITHM)
    rollout = Rollout(num_generations=4, generation_batch_size=8, max_completion_length=150)
    draws = completions_of(0.5 * torch.randn(8, 150, generator=torch.Generator().manual_seed(3)) - 3)
    batch, _ = make_batch(algorithm, rollout, draws, AlgorithmState())
    record = Record.empty(8, engine.device)
    of_policy = StepLoss(algorithm, batch, range(8), 150, record, first=True)

    def loss_of(rows: Any, logps: torch.Tensor, mask: torch.Tensor, entropy: torch.Tensor, others: torch.Tensor) -> Any:
        return of_policy(rows, logps, mask, entropy) + 1e-3 * (others.exp() * mask.unsqueeze(-1)).sum()

    loss = engine.step(SEQUENCES, range(8), loss_of)
    found = {
        "log-probs": old,
        "loss": torch.tensor(loss),
        "record": torch.cat([engine.sum_over_ranks(values).flatten() for values in record]),
        "experts": torch.tensor(list(engine.experts.metrics(partial(engine.sum_over_ranks, of_tokens=True)).values())),
        "gradient": torch.cat(gradients) if gradients else torch.tensor(engine.grad_norm),
    }
    if case.startswith("dense"):
        module = TokenLogProbs(forward_only.load(Policy(folder / kind), "float32"), 0.8, engine.group)
        sequences = SEQUENCES._replace(candidates=None)
        scored = forward_only.score(module, sequences, TOKENS, "log-probs", entropies=True)
        found["scored"], found["entropies"] = (torch.tensor([*chain(*values)]) for values in scored[:2])
        top = forward_only.score(module, sequences, TOKENS, "likeliest tokens", top_k=3)
        found["likeliest"] = torch.tensor([*chain(*top.top_logps)])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, output = map(Path, sys.argv[1:3])
    results = {case: measured(folder, case, split=True) for case in sys.argv[3:]}
    if torch.distributed.get_rank() == 0:
        torch.save(results, output)
