"""The metrics of experts are those of the optimizer steps' forward passes, however an update is carried out."""

import pytest
import torch
from cases import PACKED, write
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

SEQUENCES = Sequences([[5, 6, 7], [7, 8]], [[8, 9, 10], [11, 12]])


def loss_of(_, logps, mask, __) -> torch.Tensor:
    return (logps * mask).sum()


def test_a_token_counts_once_for_each_pass_over_the_completions(tmp_path) -> None:
    folder = write(tmp_path, "qwen3_moe", PACKED["qwen3_moe"])
    counted = []
    for checkpointing in (False, True):
        engine = Engine(Policy(folder), trainer_settings(gradient_checkpointing=checkpointing), 0)
        engine.logps(SEQUENCES)
        assert not any(counts.any() for counts in engine.experts.counts), "old log-probs are not of a step"
        engine._backward(SEQUENCES, [[]], 0, loss_of, lambda _: None)
        assert not any(counts.any() for counts in engine.experts.counts), "nor is what fills the batch of a rank"
        for _ in range(2):
            engine.step(SEQUENCES, range(2), loss_of)
        engine._backward(SEQUENCES, [[0, 1]], 0, loss_of, None)
        counted.append(torch.stack(engine.experts.counts))
    assert torch.equal(*counted)
    tokens = sum(map(len, [*SEQUENCES.prompts, *SEQUENCES.completions]))
    assert set(counted[0].sum(-1).tolist()) <= {2 * 2 * (tokens - 2), 2 * 2 * tokens}, "two experts a token, two steps"
