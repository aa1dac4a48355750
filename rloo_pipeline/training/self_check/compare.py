"""Packed log-probs and gradients of a model against the same sequences one by one in plain transformers."""

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
"""Tokens of the longest sequence, so that it goes another way than the short ones."""


class Difference(NamedTuple):
    """How far apart the two are."""

    model: str
    """Its class."""
    logps: float
    """Largest difference of a token's log-prob, nats."""
    gradient: float
    """Largest difference of a parameter's gradient, as a share of that gradient (or of a hundredth of the largest)."""
    parameter: str
    """Its name."""


def compare(config: Any, trust_remote_code: bool, longest: int) -> Difference:
    """Compares on a small copy of a model.

    Args:
        config: of the copy.
        trust_remote_code: as for the model.
        longest: tokens that its sequences may have.
    """
    plain = small.build(config, trust_remote_code, "eager").eval()
    ours = small.build(config, trust_remote_code, attention.NAME)
    ours.load_state_dict(plain.state_dict())
    dropout.remove(ours)
    sequences = probe(plain.config.get_text_config().vocab_size, longest)
    with layers.plainly():
        wanted = _one_by_one(plain, sequences)
    found = _packed(ours.train(), sequences)
    largest = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
    return Difference(type(ours).__name__, largest, *_gradients(ours, plain))


def probe(vocabulary: int, longest: int) -> Sequences:
    """Sequences of which some share their prompt, up to `longest` tokens long."""
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
    """Of tokens in the loss, of both signs, so that no two places are alike."""
    return torch.linspace(-1, 2, count).cos()


def _one_by_one(model: Any, sequences: Sequences) -> list[Tensor]:
    """Log-probs of each sequence's completion; gradients stay in the model."""
    made = []
    for prompt, completion in zip(*sequences, strict=True):
        row = torch.tensor([[*prompt, *completion]])
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)
        (logps * _weights(len(logps))).sum().backward()
        made.append(logps.detach())
    return made


def _packed(model: Any, sequences: Sequences) -> list[Tensor]:
    """The same by what trains."""
    count = len(sequences.prompts)
    made: dict[int, Tensor] = {}

    def loss(places: Sequence[int], logps: Tensor, mask: Tensor, _: Tensor) -> Tensor:
        own = [row[real] for row, real in zip(logps, mask, strict=True)]
        made.update(zip(places, (one.detach() for one in own), strict=True))
        return torch.stack([(one * _weights(len(one))).sum() for one in own]).sum()

    TokenLogProbs(model, 1.0)(sequences.pick(range(count)), loss).backward()
    return [made[place] for place in range(count)]


def _gradients(ours: Any, plain: Any) -> tuple[float, str]:
    """The largest difference of a parameter's gradient, and its name."""
    wanted = {name: _of(parameter) for name, parameter in plain.named_parameters()}
    floor = 0.01 * max(float(gradient.norm()) for gradient in wanted.values())
    worst = (0.0, "")
    for name, parameter in ours.named_parameters():
        size = max(float(wanted[name].norm()), floor)
        worst = max(worst, (float((_of(parameter) - wanted[name]).norm()) / size, name))
    return worst


def _of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
