"""Compares packed log-probs and gradients with those of plain transformers, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo_pipeline.training import dropout
from rloo_pipeline.training.kernels import attention, layers
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.self_check import small

LONGEST = attention.SHORT + 24
"""Tokens of the longest sequence: it takes the code path of long sequences, the others that of short ones."""


class Difference(NamedTuple):
    """Differences between packed and plain computation."""

    model: str
    """Class name."""
    logps: float
    """Largest difference of a token's log-prob, nats."""
    gradient: float
    """Largest difference of a parameter's gradient, divided by its norm (at least a hundredth of the largest norm)."""
    parameter: str
    """Name of that parameter."""


def compare(config: Any, trust_remote_code: bool, longest: int) -> Difference:
    """Compares the two on a small model.

    Args:
        config: transformers configuration of the small model.
        trust_remote_code: whether the model's own code may run.
        longest: tokens of the longest sequence that the model may see.
    """
    plain = small.build(config, trust_remote_code, "eager").eval()
    packed = small.build(config, trust_remote_code, attention.NAME)
    packed.load_state_dict(plain.state_dict())
    dropout.remove(packed)
    sequences = probe(plain.config.get_text_config().vocab_size, longest)
    with layers.disabled():
        plain_logps = _one_by_one(plain, sequences)
    packed_logps = _packed(packed.train(), sequences)
    largest = max(float((a - b).abs().max()) for a, b in zip(packed_logps, plain_logps, strict=True))
    return Difference(type(packed).__name__, largest, *_gradients(packed, plain))


def probe(vocabulary: int, longest: int) -> Sequences:
    """Random sequences of up to `longest` tokens; some share their prompt."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(min(3, vocabulary - 1), vocabulary, (max(count, 1),), generator=draw).tolist()

    most = max(2, min(longest, LONGEST))
    shared, other = ids(min(9, most // 2)), ids(most - min(12, most // 2))
    rest = most - len(shared)
    return Sequences(
        [shared, shared, shared, other],
        [ids(min(30, rest)), ids(min(5, rest)), ids(1), ids(most - len(other))],
    )


def _weights(count: int) -> Tensor:
    """Weights of tokens in the loss: of both signs and all different, so that a swap of two positions shows."""
    return torch.linspace(-1, 2, count).cos()


def _one_by_one(model: Any, sequences: Sequences) -> list[Tensor]:
    """Log-probs of each completion; leaves the gradients in the model."""
    all_logps = []
    for prompt, completion in zip(*sequences, strict=True):
        row = torch.tensor([[*prompt, *completion]])
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)
        (logps * _weights(len(logps))).sum().backward()
        all_logps.append(logps.detach())
    return all_logps


def _packed(model: Any, sequences: Sequences) -> list[Tensor]:
    """The same, computed by the training code."""
    count = len(sequences.prompts)
    logps_by_row: dict[int, Tensor] = {}

    def loss(positions: Sequence[int], logps: Tensor, mask: Tensor, _: Tensor) -> Tensor:
        unpadded = [row[row_mask] for row, row_mask in zip(logps, mask, strict=True)]
        logps_by_row.update(zip(positions, (row.detach() for row in unpadded), strict=True))
        return torch.stack([(row * _weights(len(row))).sum() for row in unpadded]).sum()

    TokenLogProbs(model, 1.0)(sequences.pick(range(count)), loss).backward()
    return [logps_by_row[row] for row in range(count)]


def _gradients(packed: Any, plain: Any) -> tuple[float, str]:
    """The largest relative difference of a parameter's gradient, and the parameter's name."""
    expected = {name: _gradient_of(parameter) for name, parameter in plain.named_parameters()}
    floor = 0.01 * max(float(gradient.norm()) for gradient in expected.values())
    worst = (0.0, "")
    for name, parameter in packed.named_parameters():
        size = max(float(expected[name].norm()), floor)
        worst = max(worst, (float((_gradient_of(parameter) - expected[name]).norm()) / size, name))
    return worst


def _gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
