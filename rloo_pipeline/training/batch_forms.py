"""The forms in which sequences go through a model. The self-check chooses the first that is right for the model.

`packed` is the fastest: one row without padding, in which completions share their prompt. It needs layers that attend
through transformers' attention interface and mix tokens nowhere else. `padded` and `single` are plain transformers: a
batch padded on the right, or one sequence at a time. They compute a shared prompt once per completion.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.packing import Pack, Sequences


class Packed:
    """One row of all sequences."""

    name = "packed"
    attention: str | None = attention.NAME
    """Attention implementation in transformers; None for the model's default."""
    speed = ""
    """Log text if this form is slower than the packed one."""

    def micro_batches(
        self, sequences: Sequences, rows: Sequence[int], max_tokens: int, shares: int = 1
    ) -> list[list[int]]:
        """Splits rows into micro-batches of sequences of similar length, the longest first.

        Completions of one prompt stay together. A sequence over the limit gets its own micro-batch.

        Args:
            sequences: prompts and completions.
            rows: indices of sequences.
            max_tokens: maximum number of tokens in a micro-batch.
            shares: minimum number of micro-batches, such as the number of ranks.
        """
        completions, of_prompt = sequences.completions, dict[tuple[int, ...], list[int]]()
        for row in rows:
            of_prompt.setdefault(tuple(sequences.prompts[row]), []).append(row)
        for group in of_prompt.values():
            group.sort(key=lambda row: (-len(completions[row]), row))
        tokens = sum(map(len, of_prompt)) + sum(len(completions[row]) for row in rows)
        limit = min(max_tokens, -(-tokens // shares))
        batches: list[list[int]] = []
        room = 0
        order = sorted(of_prompt, key=lambda ids: (-len(ids) - len(completions[of_prompt[ids][0]]), of_prompt[ids]))
        for prompt in order:
            shared = False
            for row in of_prompt[prompt]:
                needed = len(completions[row]) + (0 if shared else len(prompt))
                if not batches or needed > room:
                    batches.append([])
                    room = limit
                    needed = len(prompt) + len(completions[row])
                batches[-1].append(row)
                room -= needed
                shared = True
        return batches

    def inputs(self, pack: Pack) -> tuple[dict[str, Any], Int[Tensor, " completion_tokens"]]:
        """Arguments of the model's forward, and the index of the output that predicts each completion token, counted
        over the rows one after the other.
        """
        return pack.inputs(), pack.predicting

    def logits(self, model: Any, pack: Pack) -> Float[Tensor, "completion_tokens vocabulary"]:
        """The logits that predict the completion tokens."""
        out: Tensor = model(**pack.inputs(), logits_to_keep=pack.predicting, use_cache=False).logits[0]
        return out


class Padded(Packed):
    """Sequences of similar length in a batch, padded on the right."""

    name = "padded"
    attention = None
    speed = "padded batches in plain transformers, in which completions do not share their prompt: slower than packed"
    most_sequences: int | None = None
    """Maximum number of sequences in a micro-batch; None without a limit."""

    def micro_batches(
        self, sequences: Sequences, rows: Sequence[int], max_tokens: int, shares: int = 1
    ) -> list[list[int]]:
        """Like those of `Packed`, but padding counts towards `max_tokens`."""
        lengths = {row: len(sequences.prompts[row]) + len(sequences.completions[row]) for row in rows}
        limit = min(max_tokens, -(-sum(lengths.values()) // shares))
        most = self.most_sequences or len(lengths)
        batches: list[list[int]] = []
        for row in sorted(rows, key=lambda row: (-lengths[row], row)):
            if batches and len(batches[-1]) < most and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= limit:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def inputs(self, pack: Pack) -> tuple[dict[str, Any], Int[Tensor, " completion_tokens"]]:
        """As in `Packed`; with a mask only if there is padding."""
        layout, starts = pack.layout, pack.layout.starts.long()
        lengths, step = starts.diff().unsqueeze(-1), torch.arange(layout.blocks[0].tokens, device=starts.device)
        laid_out = (starts[:-1].unsqueeze(-1) + step).where(step < lengths, 0)
        real = layout.real[laid_out] & (step < lengths)
        arguments = {"input_ids": pack.input_ids[0, layout.sources[laid_out]].where(real, 0)}
        if not layout.even:
            arguments["attention_mask"] = real.long()
        if pack.vision is not None:
            arguments |= pack.vision.inputs(arguments["input_ids"])
        first_copy = layout.first_copy[pack.predicting]
        sequence = torch.searchsorted(starts, first_copy, right=True) - 1
        return arguments, sequence * len(step) + first_copy - starts[sequence]

    def logits(self, model: Any, pack: Pack) -> Float[Tensor, "completion_tokens vocabulary"]:
        """As in `Packed`, but computes all logits first, since not every model can skip some."""
        arguments, predicting = self.inputs(pack)
        out: Tensor = model(**arguments, use_cache=False).logits.flatten(0, 1).index_select(0, predicting)
        return out


class Single(Padded):
    """One sequence at a time."""

    name = "single"
    speed = "one sequence at a time in plain transformers: much slower than packed"
    most_sequences = 1


FORMS = {form.name: form for form in (Packed(), Padded(), Single())}
"""Forms by name, the fastest first."""


def form_of(model: Any) -> Packed:
    """The form that the self-check has chosen for a policy's model; packed for other models."""
    checked = getattr(model, "self_check", None)
    return FORMS[checked.form if checked is not None else Packed.name]
