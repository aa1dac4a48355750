"""Log-probs and entropies of completion tokens, from a forward pass without gradient."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.runtime.progress import counting
from rloo_pipeline.training import plain_model, policy_model, sequence_group
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.training.kernels.lm_head import TokenOutputs
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenValues(NamedTuple):
    """Values of the tokens of each completion, in nats: one list per completion, one number per token."""

    logps: list[list[float]]
    entropies: list[list[float]]
    top_logps: list[Any]
    """NumPy arrays with the log-probs of the K likeliest tokens, position by position."""
    top_ids: list[Any]
    """NumPy arrays with the ids of these K tokens."""

    @classmethod
    def empty(cls, completions: int) -> TokenValues:
        """Empty lists."""
        return cls(*([[] for _ in range(completions)] for _ in cls._fields))  # type: ignore[arg-type]


def load(policy: Policy, dtype: str, split: bool = False) -> PreTrainedModel:
    """Loads a policy for inference on this process's device; an adapter is loaded onto its base.

    With `split`, every rank calls this, and the ranks share the weights if the model can be split.

    Raises:
        UserError: the folder is incomplete, or packing does not cover the architecture.
    """
    configuration = None
    if split:
        split_model.start_ranks()
        configuration = split_model.minimal_configuration(dtype)
    model: Any = policy_model.load(policy, dtype, split=configuration)
    if policy.is_adapter:
        model = plain_model.load_adapter(model, policy)
    if split:
        split_model.gather_for_forward(model)
    model.requires_grad_(False)  # else the kernels allocate gradients, even where none is computed
    return model.to(torch.device(devices.device_type())).eval()  # type: ignore[no-any-return]


def load_configured(config: Config, policy: Policy, temperature: float) -> TokenLogProbs:
    """Loads a policy as the sections `model` and `deepspeed` say, to compute log-probs."""
    parts = config.deepspeed.sequence_parallel
    if parts > 1:
        split_model.start_ranks()  # this assigns each rank its GPU
    model = load(policy, config.model.dtype, config.deepspeed.splits_weights)
    return TokenLogProbs(model, temperature, sequence_group.group_of(parts))


def logps_of_completions(
    config: Config, policy: Policy, temperature: float, sequences: Sequences, label: str
) -> list[list[float]]:
    """Log-probs of completions under a policy that is loaded only for them, and that leaves a worker's GPU again.

    Takes the arguments of `load_configured` and `score`.
    """
    logprobs = load_configured(config, policy, temperature)
    logps = score(logprobs, sequences, config.deepspeed.micro_batch_tokens, label).logps
    logprobs.discard()
    del logprobs
    gc.collect()  # a reference cycle would keep this model in memory beside the next one
    return logps


def score(
    logprobs: TokenLogProbs, sequences: Sequences, max_tokens: int, label: str, entropies: bool = False, top_k: int = 0
) -> TokenValues:
    """Computes log-probs, and optionally entropies or likeliest tokens, of all completions, split over the ranks.

    Every rank gets all of them, and makes the same number of passes, since a pass of a split model is collective.

    Args:
        logprobs: a model from `load`, with a temperature.
        sequences: prompts and completions.
        max_tokens: tokens per micro-batch.
        label: label of the progress line.
        entropies: also computes entropies; otherwise their lists are empty.
        top_k: number of likeliest tokens to add for each position; without entropies.
    """
    device = next(logprobs.parameters()).device
    count, world, group = len(sequences.prompts), ranks.current().world, logprobs.group
    values = TokenValues.empty(count)
    batches = logprobs.form.micro_batches(sequences, range(count), max_tokens, group.streams)
    batches += batches[:1] * (-len(batches) % group.streams)
    scored: list[tuple[list[int], list[int], TokenOutputs]] = []
    with torch.no_grad(), counting(label, count) as counter:
        for rows in batches[group.stream :: group.streams]:
            pack = sequences.pick(rows, group).to(device)
            outputs: TokenOutputs = logprobs(pack, top_k=top_k, entropies=entropies)
            if top_k:  # so that they do not fill a GPU
                outputs = pytree.tree_map_only(Tensor, Tensor.cpu, outputs)
            scored.append((rows, pack.completion_lengths.tolist(), outputs))
            counter.advance(len(rows))
        for rows, lengths, outputs in scored:  # all passes are queued on a GPU before the first result is read
            for column, part in zip(values, outputs, strict=True):
                if part is not None:
                    for row, of_row in zip(rows, part.cpu().split(lengths), strict=True):
                        column[row] = of_row.tolist() if of_row.dim() == 1 else of_row.flatten().numpy()
    return values if world == 1 else _merged(ranks.gathered(values))


def _merged(parts: list[TokenValues]) -> TokenValues:
    """Merges the values of all ranks, each of which has computed some of the rows."""

    def merge(lists: Iterable[list[Any]]) -> list[Any]:
        return [next(filter(len, of_row), []) for of_row in zip(*lists, strict=True)]

    return TokenValues(*map(merge, zip(*parts, strict=True)))
