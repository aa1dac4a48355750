"""One pass over completions without a gradient: log-prob and entropy of each of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.progress import counting

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    from rloo_pipeline.training import policy, ranks

    model: Any = policy.load(folder, dtype, trust_remote_code)
    if policy.is_adapter(folder):
        import peft

        policy.check(folder)
        model = peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    return model.to(torch.device(ranks.chip())).eval()  # type: ignore[no-any-return]


def score(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    what: str,
) -> Scored:
    """Log-probs and entropies at a temperature, row by row.

    Args:
        model: a causal language model with packed attention, as `load` gives it.
        prompts, completions: token ids; none of them empty.
        temperature: of the distribution.
        max_tokens: of prompts and completions that go through the model at once.
        what: is counted, for the progress line.
    """
    import torch

    from rloo_pipeline.training import packing
    from rloo_pipeline.training.logprobs import TokenLogProbs

    device = next(model.parameters()).device
    logprobs = TokenLogProbs(model, temperature)
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    found = Scored([[]] * len(lengths), [[]] * len(lengths))
    with torch.inference_mode(), counting(what, len(lengths)) as counter:
        for rows in packing.micro_batches(lengths, max_tokens):
            pack = packing.pack([prompts[row] for row in rows], [completions[row] for row in rows]).to(device)
            for values, kept in zip(logprobs(pack), found, strict=True):
                for row, own in zip(rows, values.cpu().split(pack.completion_lengths.tolist()), strict=True):
                    kept[row] = own.tolist()
            counter.advance(len(rows))
    return found
