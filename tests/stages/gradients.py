"""A program for torchrun: loss and gradient of one optimizer step, cut in several ways, through the real engine.

`gradients.py MODEL OUTPUT`: the first rank saves {(case, completions in a micro-batch): (loss, gradient)}.
"""

import sys
from pathlib import Path

import torch
from trainers import trainer_settings, use_micro_batches

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Algorithm, Rollout
from rloo_pipeline.training.batch import AlgorithmState, RoundTensors, make_batch
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.objective import Record, StepLoss
from rloo_pipeline.training.packing import Sequences

LENGTH = 24
"""Tokens per sequence, so that max_tokens decides how many sequences are in a micro-batch."""
ROWS = list(range(8))
TOKEN = {"importance_sampling_level": "token"}
CASES = {
    **{mode: {"loss_agg_mode": mode} for mode in ("sequence", "token_mean")},
    "grpo": {**TOKEN, "loss_agg_mode": "sequence_mean_token_mean"},
    "token_sum": {**TOKEN, "loss_agg_mode": "sequence_mean_token_sum"},
    "dr_grpo": {**TOKEN, "loss_agg_mode": "sequence_mean_token_sum_norm"},
    "loss_kl": {**TOKEN, "kl": {"placement": "loss", "estimator": "k3"}, "loss_agg_mode": "token_mean"},
    "token_reward": {**TOKEN, "kl": {"placement": "token_reward"}},
    "cispo_tis": {**TOKEN, "clip": "cispo", "mismatch": {"correction": "token_tis"}},
    "gspo_mis": {
        "importance_sampling_level": "sequence_mean",
        "loss_agg_mode": "sequence_mean_token_mean",
        "mismatch": {"correction": "token_mis", "max": 1.1},
    },
    "masked": {"mask_truncated_completions": True, "mismatch": {"correction": "sequence_mis"}},
}


def plain(rewards: torch.Tensor) -> torch.Tensor:
    """The rewards as advantages: they do not sum to 0, so the loss is more than rounding."""
    return rewards.nan_to_num(0.0)


def completions_of(sequences: Sequences, old: torch.Tensor) -> RoundTensors:
    """Rewards and log-probs for which every term of a loss matters."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([len(ids) for ids in sequences.completions])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)

    def noisy_logps() -> torch.Tensor:
        return torch.where(mask, old + 0.1 * torch.randn(old.shape, generator=generator), 0.0)

    scores = torch.tensor([1, 0, 0, 2, 1, 1, 0, float("nan")], dtype=torch.float64)
    return RoundTensors(
        scores, mask, torch.tensor([False] * 6 + [True] * 2), noisy_logps(), noisy_logps(), noisy_logps()
    )


def main(model: Path, output: Path) -> None:
    """Computes every case in micro-batches of 8, 4 and 1."""
    torch.set_num_threads(1)
    engine = Engine(Policy(model), trainer_settings(temperature=0.8), 0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 20, (8, LENGTH), generator=generator).tolist()
    sequences = Sequences([row[: 4 + i] for i, row in enumerate(ids)], [row[4 + i :] for i, row in enumerate(ids)])
    data = completions_of(sequences, engine.logps(sequences))
    gradients: list[torch.Tensor] = []

    def keep() -> None:
        """Replaces clipping, at which point every rank has the whole gradient."""
        parameters = engine.engine.module.parameters()
        gradients.append(torch.cat([parameter.grad.flatten().clone() for parameter in parameters]).cpu())

    engine.engine.clip_fp32_gradients = keep
    all_gradients = {}
    for name, keys in CASES.items():
        algorithm = Algorithm.model_validate({"advantage": f"{__file__}:plain", **keys})
        rollout = Rollout(num_generations=4, generation_batch_size=8, max_completion_length=30)
        batch, _ = make_batch(algorithm, rollout, data, AlgorithmState())
        for size in (8, 4, 1):
            loss_of = StepLoss(algorithm, batch, ROWS, rollout.max_completion_length, Record.empty(8, engine.device))
            use_micro_batches(engine, size * LENGTH)
            loss = engine.step(sequences, ROWS, loss_of)
            all_gradients[name, size] = (loss, gradients.pop())
    if engine.rank.first:
        torch.save(all_gradients, output)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
