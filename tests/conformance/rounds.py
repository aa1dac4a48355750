"""What both sides train on: a small round of completions, and the weights."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUPS = 4
LONGEST = 8
"""max_completion_length."""
SEED = 17_241
"""With these draws no loss cancels out so far that float32's rounding shows (a tenth of its terms is left at least,
which the tests see to), and none hangs on one ratio alone.
"""


class Round(NamedTuple):
    """Completions of a round, one entry each; neighbours are a group."""

    samples: int
    prompts: list[str]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    """No two are alike. Those that are not truncated end with the end token, some of them at full length."""
    truncated: list[bool]
    scores: list[list[float | None]]
    """One list a reward function."""
    noise: list[list[float]]
    """By how much the sampler's log-probs differ from the trainer's, token by token."""

    @property
    def rows(self) -> list[int]:
        """All of them."""
        return list(range(len(self.prompts)))


class Step(NamedTuple):
    """The rows, loss, gradient and metrics of an optimizer step."""

    rows: list[int]
    loss: float
    gradient: Mapping[str, Tensor]
    metrics: Mapping[str, float | None]


def make_round(
    tokenizer: PreTrainedTokenizerBase, samples: int, functions: int = 1, unknown: Sequence[tuple[int, int]] = ()
) -> Round:
    """A synthetic round of `GROUPS` prompts; every fourth completion is truncated at full length.

    Args:
        unknown: pairs of a reward function and a row to which it gives None.
    """
    rng = random.Random(SEED + samples)
    prompts, completions, truncated = [], [], []
    for group in range(GROUPS):
        prompt = "".join(rng.choice("0123456789+") for _ in range(3 + 2 * group)) + "="
        for _ in range(samples):
            place = len(prompts)
            whole = place % 4 != 3
            length = rng.randrange(3, LONGEST) if whole and place % 8 != 2 else LONGEST
            body = [rng.randrange(4, len(tokenizer)) for _ in range(length - whole)]
            prompts.append(prompt)
            completions.append(body + [tokenizer.eos_token_id] * whole)
            truncated.append(not whole)
    assert len({tuple(ids) for ids in completions}) == len(completions)
    scores = [[rng.gauss(0.3, 1.0) for _ in prompts] for _ in range(functions)]
    for function, row in unknown:
        scores[function][row] = None
    return Round(
        samples,
        prompts,
        tokenizer(prompts)["input_ids"],
        completions,
        truncated,
        scores,
        [[rng.gauss(0.0, 0.25) for _ in ids] for ids in completions],
    )


def shift(model: torch.nn.Module, number: int) -> None:
    """Moves the weights by noise that depends on `number` alone: 0 makes the policy of the reference model, 1 and up
    take the place of optimizer steps.
    """
    scale = 0.15 if number == 0 else 0.025
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
