"""A micro-batch asks the device for nothing: the host prepares the next one while a GPU computes.

The device is `meta`, whose tensors have shapes and gradients but no values, so that whatever would wait for a value, or
for a size that depends on values, raises.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rloo_pipeline.config import Algorithm
from rloo_pipeline.training.batch import Batch, RoundTensors
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.expert_load import ExpertLoad
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.objective import Record, StepLoss
from rloo_pipeline.training.packing import Sequences

META = torch.device("meta")
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQUENCES = Sequences([[1, 2, 3]] * 2 + [[4, 5]] * 2, [[6, 7, 8], [9], [10, 11], [12, 13, 14, 15, 16]])
LONGEST, COUNT = 5, 4
ALGORITHMS = {
    "rloo": {"beta": 0.0},
    "corrected, with a KL in the loss": {
        "beta": 0.1,
        "importance_sampling_level": "token",
        "kl": {"placement": "loss", "estimator": "k3", "bias_correction": True},
        "mismatch": {"correction": "token_tis", "max": 2.0, "reject": {"by": "sequence_mean", "min": 0.9, "max": 1.1}},
    },
    "a teacher's likeliest tokens": {"beta": 0.0, "teacher": {"name_or_path": "teacher", "top_k": 2}},
}


class Copies(TorchDispatchMode):
    """Numbers of tensors that go to the device, by whether the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {True: 0, False: 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_copy = function is torch.ops.aten._to_copy.default
        if is_copy and args[0].device.type == "cpu" and kwargs.get("device") == META:
            self.counts[kwargs.get("non_blocking", False)] += 1
        return function(*args, **kwargs)


def batch() -> Batch:
    mask = torch.arange(LONGEST) < torch.tensor([len(ids) for ids in SEQUENCES.completions]).unsqueeze(-1)
    logps = -torch.rand(COUNT, LONGEST).masked_fill(~mask, 0.0)
    none = torch.zeros(COUNT, dtype=torch.bool)
    top = torch.zeros(COUNT, LONGEST, 2).masked_fill(mask.unsqueeze(-1), -1.0)
    completions = RoundTensors(
        torch.zeros(COUNT).double(), mask, none, logps, logps, None, logps, teacher_top_logps=top
    )
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    return Batch(completions, completions.scores, None, advantages, none, none, beta=0.1)


def engine(module: TokenLogProbs) -> SimpleNamespace:
    """An engine without DeepSpeed, as `Engine._backward` and `outputs` use it, with a micro-batch for each prompt."""
    module.backward = lambda loss: loss.backward()
    return SimpleNamespace(
        engine=module,
        device=META,
        group=module.group,
        experts=ExpertLoad(module.model),
        rank=SimpleNamespace(world=1),
        settings=SimpleNamespace(uses_dropout=False),
        sum_over_ranks=lambda values: values,
        _own_micro_batches=lambda *_: [[0, 1], [3, 2]],
    )


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        *(("dense", algorithm) for algorithm in ALGORITHMS),
        ("experts", "rloo"),
        ("replayed experts", "corrected, with a KL in the loss"),
        *(("all logits at once", algorithm) for algorithm in list(ALGORITHMS)[1:]),
    ],
)
def test_nothing_in_a_micro_batch_waits_for_the_device(model, algorithm, monkeypatch) -> None:
    attention.register()
    mixture = "experts" in model
    config = Qwen3MoeConfig(**SHAPE, **HEADS, **EXPERTS) if mixture else Qwen3Config(**SHAPE, **HEADS)
    config._attn_implementation = attention.NAME
    causal = (Qwen3MoeForCausalLM if mixture else Qwen3ForCausalLM)(config)
    module = TokenLogProbs(causal.train(), 0.7).to(META, torch.bfloat16)
    module.never = (3, 4)
    if model == "all logits at once":
        module.head_form = None
    sequences = SEQUENCES
    if model == "replayed experts":
        chosen = [np.zeros((len(a) + len(b) - 1, 2 * 2), np.int32) for a, b in zip(*SEQUENCES[:2], strict=True)]
        sequences = SEQUENCES._replace(experts=chosen)
    if "teacher" in ALGORITHMS[algorithm]:
        candidates = [np.tile([[3, 4]], (len(ids), 1)) for ids in SEQUENCES.completions]
        sequences = sequences._replace(candidates=candidates)
    record = Record.empty(COUNT, META)
    loss_of = StepLoss(Algorithm(**ALGORITHMS[algorithm]), batch(), range(COUNT), LONGEST, record, first=True)
    with Copies() as copies:
        loss = Engine._backward(engine(module), sequences, [[0, 1], [3, 2]], 0, loss_of, lambda _: None)
        before_steps = sequences._replace(candidates=None)
        before = Engine.outputs(engine(module), before_steps, lambda _: None, entropies=True)
    assert loss.device == record.gap.device == before.device == META
    assert all(parameter.grad is not None for name, parameter in causal.named_parameters() if "experts" not in name)
    assert copies.counts[True] > 20
    assert not copies.counts[False]


def test_the_next_micro_batch_is_packed_before_the_backward_pass() -> None:
    """After it, DeepSpeed waits for its reductions under ZeRO 2 and 3."""
    events = list[str]()

    class Module:
        def __call__(self, *_) -> torch.Tensor:
            events.append("forward")
            return torch.zeros((), requires_grad=True)

        def backward(self, _) -> None:
            events.append("backward")

    class Packed(Sequences):
        def pick(self, *arguments):
            events.append("pack")
            return super().pick(*arguments)

    stub = SimpleNamespace(
        engine=Module(),
        device=META,
        group=None,
        experts=SimpleNamespace(counting=lambda _: nullcontext()),
        rank=SimpleNamespace(world=1),
    )
    Engine._backward(stub, Packed(*SEQUENCES), [[0], [1], [2, 3]], 0, lambda *_: None, None)
    assert events == ["pack", *["forward", "pack", "backward"] * 2, "forward", "backward"]
