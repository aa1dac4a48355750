"""One pass over completions without a gradient: log-prob and entropy of each of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.runtime.progress import counting

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rloo_pipeline.training.kernels.lm_head import LossOf
    from rloo_pipeline.training.logprobs import TokenLogProbs
    from rloo_pipeline.training.packing import Sequences


class Scored(NamedTuple):
    """Of each completion, one number a token."""

    logps: list[list[float]]
    entropies: list[list[float]]


def load(folder: Path, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """A policy to be read, not trained, on this process's device; an adapter comes with its base.

    Raises:
        UserError: it is not whole, or of an architecture that packing does not cover.
    """
    import torch

    from rloo_pipeline.artifacts import policy
    from rloo_pipeline.runtime import devices
    from rloo_pipeline.training import policy_model

    model: Any = policy_model.load(folder, dtype, trust_remote_code)
    if policy.is_adapter(folder):
        import peft

        policy.check(folder)
        model = peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    return model.to(torch.device(devices.device_type())).eval()  # type: ignore[no-any-return]


def score(logprobs: TokenLogProbs, sequences: Sequences, max_tokens: int, what: str, entropies: bool = False) -> Scored:
    """Log-probs, and entropies where asked for, row by row.

    Args:
        logprobs: a model as `load` gives it, at a temperature.
        sequences: prompts and completions.
        max_tokens: that go through the model at once.
        what: is counted, for the progress line.
        entropies: whether they are wanted; without them a row has none.
    """
    import torch

    device = next(logprobs.parameters()).device
    count = len(sequences.prompts)
    found = Scored([[] for _ in range(count)], [[] for _ in range(count)])
    with torch.no_grad(), counting(what, count) as counter:
        for rows in sequences.micro_batches(range(count), max_tokens):
            pack = sequences.pick(rows).to(device)
            if entropies:
                logprobs(pack, _keeper(found, rows))
            else:
                parts = logprobs(pack).cpu().split(pack.completion_lengths.tolist())
                for row, own in zip(rows, parts, strict=True):
                    found.logps[row] = own.tolist()
            counter.advance(len(rows))
    return found


def _keeper(found: Scored, rows: Sequence[int]) -> LossOf:
    """A loss of 0 that writes down what it is given, since entropies are told to losses alone."""

    def keep(places: Sequence[int], logps: Tensor, mask: Tensor, entropy: Tensor) -> Tensor:
        for place, values, entropies, real in zip(places, logps, entropy, mask, strict=True):
            found.logps[rows[place]] = values[real].tolist()
            found.entropies[rows[place]] = entropies[real].tolist()
        return (logps * 0).sum()

    return keep
