"""This package on a given round: from scores to advantages, and from log-probs to loss and gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conformance.rounds import LONGEST, Round, Step, shift
from torch import Tensor

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.tables import weighted_sums
from rloo_pipeline.config import Algorithm, Reward, Rollout
from rloo_pipeline.training import packing, policy_model
from rloo_pipeline.training.batch import AlgorithmState, RoundTensors, make_batch
from rloo_pipeline.training.engine import loss_at_rows
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.metrics import update_metrics
from rloo_pipeline.training.objective import Record, StepLoss


def steps(
    folder: Path,
    round_: Round,
    rows: Sequence[Sequence[int]],
    sampling_logps: list[list[float]] | None = None,
    temperature: float = 1.0,
    reward_weights: Sequence[float] = (1.0,),
    **options: Any,
) -> list[Step]:
    """What optimizer steps on these rows make of a round, with the model in `folder` as the reference; each step in two
    micro-batches.

    Args:
        options: of the section `algorithm`.

    Returns:
        The steps with their metrics; `terms` of the last is the sum of what the completions add to its loss, each
        without its sign.
    """
    algorithm = Algorithm(**options)
    rollout = Rollout(
        num_generations=round_.samples,
        generation_batch_size=len(round_.prompts),
        temperature=temperature,
        max_completion_length=LONGEST,
    )
    model = TokenLogProbs(_model(folder), temperature)
    reference = _logps(model, round_)
    shift(model.model, 0)
    completions = RoundTensors(
        scores=_scores(round_, reward_weights),
        mask=_padded([[1.0] * len(ids) for ids in round_.completion_ids]).bool(),
        truncated=torch.tensor(round_.truncated),
        old_logps=_logps(model, round_),
        reference_logps=reference if algorithm.beta else None,
        sampling_logps=None if sampling_logps is None else _padded(sampling_logps),
    )
    batch, _ = make_batch(algorithm, rollout, completions, AlgorithmState())
    written = []
    for number, chosen in enumerate(rows):
        record = Record.empty(len(round_.prompts))
        loss_of = StepLoss(algorithm, batch, chosen, LONGEST, record, first=number == 0)
        loss = terms = 0.0
        for part in (chosen[0::2], chosen[1::2]):
            pack = _pack(round_, part)
            share = model(pack, loss_at_rows(part, loss_of))
            share.backward()
            loss += float(share)
            terms += _terms(model, pack, part, loss_of) if number == len(rows) - 1 else 0.0
        gradient = {name: parameter.grad.clone() for name, parameter in model.model.named_parameters()}
        metrics = update_metrics(batch, record, algorithm, ratio_is_known=True)
        written.append(Step(list(chosen), loss, gradient, {"terms": terms, **metrics}))
        model.zero_grad()
        shift(model.model, number + 1)
    return written


def _model(folder: Path) -> torch.nn.Module:
    """A copy of a model that is loaded once."""
    return copy.deepcopy(_loaded(folder))


@functools.cache
def _loaded(folder: Path) -> torch.nn.Module:
    return policy_model.load(Policy(folder), "float32")


def _terms(model: TokenLogProbs, pack: packing.Pack, rows: Sequence[int], loss_of: StepLoss) -> float:
    """The sum of what these completions add to the loss, each without its sign."""
    with torch.no_grad():
        logps, mask = pack.unpack(model(pack).logps)
        return sum(
            abs(float(loss_of([row], logps[[place]], mask[[place]], torch.zeros_like(logps[[place]]))))
            for place, row in enumerate(rows)
        )


def sampling_logps(folder: Path, round_: Round) -> list[list[float]]:
    """Log-probs that a sampler could have given: the policy's with the round's noise."""
    model = TokenLogProbs(_model(folder), 1.0)
    shift(model.model, 0)
    logps = _logps(model, round_).tolist()
    return [[a + b for a, b in zip(row, noise, strict=False)] for row, noise in zip(logps, round_.noise, strict=True)]


def _scores(round_: Round, weights: Sequence[float]) -> Tensor:
    """The weighted sum of the rewards of each completion; NaN where there is none."""
    rewards = [Reward(function="module:function", weight=weight) for weight in weights]
    return torch.from_numpy(weighted_sums([reward.weight for reward in rewards], round_.scores))


def _logps(model: TokenLogProbs, round_: Round) -> Tensor:
    """[completions, longest], 0 behind a completion's end."""
    pack = _pack(round_, round_.rows)
    with torch.no_grad():
        return pack.unpack(model(pack).logps)[0]


def _pack(round_: Round, rows: Sequence[int]) -> packing.Pack:
    return packing.pack([round_.prompt_ids[row] for row in rows], [round_.completion_ids[row] for row in rows])


def _padded(rows: list[list[float]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
