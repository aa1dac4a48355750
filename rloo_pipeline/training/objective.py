"""The loss of an optimizer step, micro-batch by micro-batch, and what it saw of each completion.

    loss = Σ over the step's completions of (mismatch weight × policy loss + β × KL, where the KL is in the loss)

aggregated by loss_agg_mode with totals that are fixed before the step is cut, so no cut changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rloo_pipeline.algorithm import kl, mismatch
from rloo_pipeline.algorithm.loss import Bounds, Totals, aggregate, log_ratio, losses
from rloo_pipeline.config import Algorithm
from rloo_pipeline.training.batch import Batch


class Record(NamedTuple):
    """What the steps saw of each completion, all [completions]; the last pass over a round stays. 0 where not seen."""

    ratio: Tensor
    low: Tensor
    """Share of its actions clipped below."""
    high: Tensor
    """Share of its actions clipped above."""
    entropy: Tensor
    """Sum over its tokens, nats."""
    kl: Tensor
    """Sum over its tokens of the KL in the loss, nats."""
    seen: Tensor
    """1 where the last pass took it."""
    weight: Tensor
    """[completions, 3]: least, mean and largest mismatch weight of its actions, as its loss was multiplied by them."""
    outside: Tensor
    """Share of its actions that the mismatch correction truncated or dropped."""
    gap: Tensor
    """[completions, 5]: `mismatch.Gap` at the round's first step, where no other log-probs of π_old are there."""
    compared: Tensor
    """1 where that is known."""

    @classmethod
    def empty(cls, completions: int) -> Record:
        """Nothing seen yet."""
        shapes = {"gap": (completions, len(mismatch.Gap._fields)), "weight": (completions, 3)}
        return cls(**{name: torch.zeros(shapes.get(name, (completions,))) for name in cls._fields})

    def forget_pass(self) -> None:
        """Before another pass."""
        for values in self[:8]:
            values.zero_()


class StepLoss:
    """The loss of one optimizer step: called with a micro-batch, gives its share."""

    def __init__(
        self, algorithm: Algorithm, batch: Batch, rows: Sequence[int], longest: int, record: Record, first: bool = False
    ) -> None:
        """Fixes the totals.

        Args:
            rows: the completions of the step, those that are masked among them.
            longest: max_completion_length.
            record: is filled.
            first: whether this is the round's first step, where the trainer is still the policy that sampled.
        """
        self.algorithm, self.batch, self.record = algorithm, batch, record
        chosen = list(rows)
        lengths = batch.completions.mask[chosen].sum(-1)
        self.totals = Totals(
            completions=int((~batch.out[chosen]).sum()),
            tokens=int(lengths[~batch.masked[chosen]].sum()),
            longest=longest,
        )
        self.compares = first and batch.completions.sampling_logps is not None

    def __call__(self, rows: Sequence[int], logps: Tensor, mask: Tensor, entropy: Tensor) -> Tensor:
        """A micro-batch's share of the step's loss.

        Args:
            rows: its completions.
            logps, mask, entropy: [rows, tokens] under the policy being trained.
        """
        algorithm, batch, chosen = self.algorithm, self.batch, list(rows)
        level, correction = algorithm.importance_sampling_level, algorithm.mismatch
        kept = mask & ~batch.masked[chosen].unsqueeze(-1).to(mask.device)
        old = self._of(batch.completions.old_logps, chosen, logps)
        old = logps.detach() if old is None else old
        advantages = batch.advantages[chosen].to(logps.device)
        advantages = advantages[:, : logps.shape[1]] if advantages.dim() == 2 else advantages
        made = losses(logps, old, advantages, kept, level, algorithm.clip, bounds_of(algorithm))
        parts = made.loss * ~batch.out[chosen].unsqueeze(-1).to(mask.device)
        sampling = self._of(batch.completions.sampling_logps, chosen, logps)
        if sampling is not None and correction.correction != "none":
            made_of = mismatch.weights(old, sampling, kept, correction.correction, correction.min, correction.max)
            parts = parts * made_of.weight
            self._note_weights(chosen, made_of, kept if correction.correction.startswith("token") else None)
        loss = aggregate(parts, kept, algorithm.loss_agg_mode, self.totals)
        reference = self._of(batch.completions.reference_logps, chosen, logps)
        if reference is not None and algorithm.kl.placement == "loss":
            tokens = kl.estimate(algorithm.kl.estimator, logps, reference, kept)
            self.record.kl[chosen] = tokens.detach().sum(-1).cpu()
            if algorithm.kl.bias_correction:
                tokens = tokens * log_ratio(logps, old, kept, level).exp()
            loss = loss + batch.beta * aggregate(tokens, kept, algorithm.loss_agg_mode, self.totals)
        for values, new in zip(self.record[:3], made[1:], strict=True):
            values[chosen] = new.cpu()
        self.record.entropy[chosen] = (entropy * kept).sum(-1).cpu()
        self.record.seen[chosen] = kept.any(-1).float().cpu()
        if self.compares and sampling is not None:
            self.record.gap[chosen] = torch.stack(mismatch.gap(logps, sampling, kept), dim=-1).float().cpu()
            self.record.compared[chosen] = self.record.seen[chosen]
        return loss

    def _note_weights(self, rows: list[int], made: mismatch.Weights, actions: Tensor | None) -> None:
        """Records the weights of completions; `actions` is true on their tokens where tokens are weighed."""
        weight = made.weight.float()
        there = torch.ones_like(made.outside) if actions is None else actions
        count = there.sum(-1).clamp(min=1)
        least = torch.where(there, weight, torch.inf).amin(-1).nan_to_num(posinf=0.0)
        mean = torch.where(there, weight, 0.0).sum(-1) / count
        self.record.weight[rows] = torch.stack([least, mean, weight.amax(-1)], dim=-1).cpu()
        self.record.outside[rows] = (made.outside.sum(-1) / count).cpu()

    @staticmethod
    def _of(values: Tensor | None, rows: list[int], like: Tensor) -> Tensor | None:
        """Some rows of [completions, longest], cut to the micro-batch's width, on its device."""
        return None if values is None else values[rows, : like.shape[1]].to(like.device)


def bounds_of(algorithm: Algorithm) -> Bounds:
    """How far a ratio counts."""
    high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
    return Bounds(algorithm.epsilon, high, algorithm.delta)
