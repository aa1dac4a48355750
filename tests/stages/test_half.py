"""A step in 16 bits is AdamW's step on float32 copies of the weights, with gradients accumulated in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training import policy_model
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

ROWS, LENGTH = 8, 16
RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.99), 1e-8, 0.1
SCALE = {"bfloat16": 1.0, "float16": 2.0**13}
"""Loss scale, so that gradients in float16 do not vanish. DeepSpeed's initial 2¹⁶ would overflow."""


def loss_of(rows: Any, logps: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    """A loss with a gradient norm above 1, so that it is clipped, and with rows of opposite gradients."""
    weights = torch.tensor([-0.5 if row % 3 else 1.0 for row in rows], device=logps.device)
    return -((logps * mask).sum(-1) * weights).sum() / 20


def expected_weights(model: Any, sequences: Sequences, dtype: str) -> dict[str, Tensor]:
    """The weights after AdamW's first step, in float32."""
    module = TokenLogProbs(model, 1.0)
    total = {name: torch.zeros_like(weights, dtype=torch.float64) for name, weights in model.named_parameters()}
    for row in range(ROWS):
        module.zero_grad()
        loss = module(sequences.pick([row]).to(model.device), lambda _, *others, row=row: loss_of([row], *others))
        (loss * SCALE[dtype]).backward()
        for name, weights in model.named_parameters():
            total[name] += weights.grad.double() / SCALE[dtype]
    copies = {name: torch.nn.Parameter(weights.detach().float()) for name, weights in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in total.values()]).norm()
    assert norm > 1
    for name, copy in copies.items():
        copy.grad = (total[name] / norm).float()
    groups = [{"params": [copy], "weight_decay": 0.0 if "norm" in name else DECAY} for name, copy in copies.items()]
    torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON).step()
    return {name: copy.detach() for name, copy in copies.items()}


@pytest.mark.parametrize("dtype", ["float32", *SCALE])
def test_a_gradient_that_is_not_finite_is_an_error(tmp_path, dtype) -> None:
    tiny_qwen3(tmp_path / "model", 0, hidden_size=32, layers=1, heads=1, key_value_heads=1, head_dim=32)
    engine = Engine(Policy(tmp_path / "model"), trainer_settings(RATE, dtype=dtype), 0)
    with pytest.raises(UserError, match=r"optimizer step 1: the gradient norm is (nan|inf)"):
        engine.step(Sequences([[4]], [[5, 6]]), [0], lambda _, logps, *__: logps.sum() * torch.nan)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", list(SCALE))
def test_the_first_step_is_adamws(tmp_path, zero_stage, dtype) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    folder = tmp_path / "model"
    tiny_qwen3(folder, 0, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=16, intermediate_size=64)
    ids = torch.randint(4, 20, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = Sequences([row[:6] for row in ids], [row[6:] for row in ids])
    before, model = (policy_model.load(Policy(folder), dtype).to(devices.device_type()) for _ in range(2))
    expected = expected_weights(model, sequences, dtype)
    adam = {"adam_betas": BETAS, "adam_epsilon": EPSILON, "weight_decay": DECAY}
    engine = Engine(
        Policy(folder),
        trainer_settings(RATE, dtype=dtype, zero_stage=zero_stage, max_tokens_per_micro_batch=LENGTH, **adam),
        0,
    )
    engine.step(sequences, range(ROWS), loss_of)
    distance = length = 0.0
    for (name, weights), old in zip(engine.model.named_parameters(), before.parameters(), strict=True):
        copy = safe_get_full_fp32_param(weights).view(old.shape)
        distance += float((copy - expected[name]).norm() ** 2)
        length += float((expected[name] - old.float()).norm() ** 2)
    assert (distance / length) ** 0.5 < 1e-4
    assert engine.grad_norm > 1
