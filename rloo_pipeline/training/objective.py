"""The loss of an optimizer step, micro-batch by micro-batch, and its statistics per completion.

    loss = Σ over the step's completions of (mismatch weight × policy loss + β × KL + weight × divergence)

β × KL is present where `kl.placement` is `loss`, the divergence from a teacher with `algorithm.teacher.top_k`. The sum
is aggregated by `loss_agg_mode`, with totals that are fixed before the step is split into micro-batches, so the split
does not change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rloo_pipeline import import_string
from rloo_pipeline.algorithm import divergence, kl, mismatch
from rloo_pipeline.algorithm.loss import Bounds, Totals, aggregate, log_ratio, losses
from rloo_pipeline.algorithm.mismatch import Rejection
from rloo_pipeline.config.algorithm import Algorithm, Clip
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.training.batch import Batch, call_own, of_shape
from rloo_pipeline.user_code.reward_call import signature_of


class Record(NamedTuple):
    """Statistics of the optimizer steps, one row per completion; the last pass over the round overwrites earlier ones.

    Values are 0 for completions that no step has trained on.
    """

    ratio: Float[Tensor, " completions"]
    """π_θ/π_old, the mean over actions."""
    low: Float[Tensor, " completions"]
    """Share of actions clipped below."""
    high: Float[Tensor, " completions"]
    """Share of actions clipped above."""
    entropy: Float[Tensor, " completions"]
    """Entropy of the policy, summed over tokens, in nats."""
    kl: Float[Tensor, " completions"]
    """KL in the loss, summed over tokens, nats."""
    trained: Float[Tensor, " completions"]
    """1 if the last pass trained on the completion."""
    weight: Float[Tensor, "completions 3"]
    """Smallest, mean and largest mismatch weight that multiplied the losses of its actions."""
    outside: Float[Tensor, " completions"]
    """Share of actions that the mismatch correction truncated or dropped."""
    distilled: Float[Tensor, " completions"]
    """Divergence from the teacher in the loss, summed over tokens, nats."""
    gap: Float[Tensor, "completions 7"]
    """`mismatch.Gap` at the first step of the round, used if there was no pass for π_old."""
    has_gap: Float[Tensor, " completions"]
    """1 if `gap` is measured."""

    @classmethod
    def empty(cls, completions: int, device: torch.device | None = None) -> Record:
        """A record of zeros, on the device of the log-probs so that recording does not wait for it."""
        shapes = {"gap": (completions, len(mismatch.Gap._fields)), "weight": (completions, 3)}
        return cls(**{name: torch.zeros(shapes.get(name, (completions,)), device=device) for name in cls._fields})

    def reset_pass(self) -> None:
        """Zeroes what each pass over the round measures again: all but `gap` and `has_gap`."""
        for values in self[:9]:
            values.zero_()


class StepLoss:
    """The loss of one optimizer step: a function from a micro-batch to its share of the loss."""

    def __init__(
        self, algorithm: Algorithm, batch: Batch, rows: Sequence[int], longest: int, record: Record, first: bool = False
    ) -> None:
        """Fixes the totals of the step.

        Args:
            algorithm: the section `algorithm`.
            batch: the round's batch.
            rows: completions of the step, including masked ones.
            longest: `max_completion_length` in tokens.
            record: statistics to fill.
            first: True for the round's first step, before which the trainer holds π_old.
        """
        self.algorithm, self.batch, self.record = algorithm, batch, record
        row_list = list(rows)
        lengths = batch.completions.mask[row_list].sum(-1)
        self.totals = Totals(
            completions=int((~batch.excluded[row_list]).sum()),
            tokens=int(lengths[~batch.masked[row_list]].sum()),
            longest=longest,
        )
        self.clip: Clip | Callable[..., Tensor] = algorithm.clip if algorithm.loss is None else own_loss(algorithm.loss)
        # In the first step ratios differ from 1 only by rounding, whose sign alone would decide kl_cov's gradient.
        nothing_to_hold = first and algorithm.clip == "kl_cov" and algorithm.old_logps == "trainer"
        self.chosen = None if nothing_to_hold else batch.chosen
        self.measures_gap = first and batch.completions.sampling_logps is not None

    def __call__(
        self,
        rows: Sequence[int],
        logps: Float[Tensor, "rows tokens"],
        mask: Bool[Tensor, "rows tokens"],
        entropy: Float[Tensor, "rows tokens"],
        candidates: Float[Tensor, "rows tokens K"] | None = None,
    ) -> Float[Tensor, ""]:
        """Computes a micro-batch's share of the loss and records its statistics.

        Args:
            rows: the completions of the micro-batch.
            logps: log-probs under the policy being trained.
            mask: True for completion tokens.
            entropy: entropy of each token's distribution, in nats.
            candidates: log-probs of the teacher's likeliest tokens, with `algorithm.teacher.top_k`.
        """
        algorithm, batch, chosen = self.algorithm, self.batch, torch.tensor([*rows])
        record_rows = devices.moved(chosen, self.record.ratio.device)
        in_loss = mask & ~devices.moved(batch.masked[chosen], mask.device).unsqueeze(-1)
        old = self._rows_of(batch.completions.old_logps, chosen, logps)
        old = logps.detach() if old is None else old
        advantages = devices.moved(batch.advantages[chosen], logps.device)
        advantages = advantages[:, : logps.shape[1]] if advantages.dim() == 2 else advantages
        level = algorithm.importance_sampling_level
        picked = self._rows_of(self.chosen, chosen, logps)
        clip = self.clip if isinstance(self.clip, str) else partial(self.clip, entropies=entropy)
        result = losses(logps, old, advantages, in_loss, level, clip, clip_bounds(algorithm), picked)
        action_losses = result.loss * ~devices.moved(batch.excluded[chosen], mask.device).unsqueeze(-1)
        kept = self._rows_of(batch.kept, chosen, logps)
        if kept is not None:
            action_losses = action_losses * kept
        sampling = self._rows_of(batch.completions.sampling_logps, chosen, logps)
        if sampling is not None and algorithm.mismatch.correction != "none":
            action_losses = action_losses * self._mismatch_weights(record_rows, old, sampling, in_loss)
        loss = aggregate(action_losses, in_loss, algorithm.loss_agg_mode, self.totals)
        reference = self._rows_of(batch.completions.reference_logps, chosen, logps)
        if reference is not None and algorithm.kl.placement == "loss":
            loss = loss + batch.beta * self._kl(record_rows, logps, old, reference, in_loss)
        teacher_top = self._rows_of(batch.completions.teacher_top_logps, chosen, logps)
        if candidates is not None and teacher_top is not None:
            loss = loss + self._distilled(record_rows, candidates, teacher_top, in_loss)
        for values, measured in zip(self.record[:3], result[1:], strict=True):
            values[record_rows] = measured
        self.record.entropy[record_rows] = (entropy * in_loss).sum(-1)
        self.record.trained[record_rows] = in_loss.any(-1).float()
        if self.measures_gap and sampling is not None:
            self.record.gap[record_rows] = torch.stack(mismatch.gap(logps, sampling, in_loss), dim=-1).float()
            self.record.has_gap[record_rows] = self.record.trained[record_rows]
        return loss

    def _mismatch_weights(self, record_rows: Tensor, old: Tensor, sampling: Tensor, in_loss: Tensor) -> Tensor:
        """Mismatch weight of each action; records the weights."""
        section = self.algorithm.mismatch
        assert section.correction != "none"
        rejection = None if section.reject is None else Rejection(**dict(section.reject))
        weight, outside = mismatch.weights(
            old, sampling, in_loss, section.correction, section.min, section.max, rejection
        )
        actions = in_loss if section.acts_on_tokens else torch.ones_like(outside)
        count = actions.sum(-1).clamp(min=1)
        float_weight = weight.float()
        smallest = torch.where(actions, float_weight, torch.inf).amin(-1).nan_to_num(posinf=0.0)
        mean = torch.where(actions, float_weight, 0.0).sum(-1) / count
        self.record.weight[record_rows] = torch.stack([smallest, mean, float_weight.amax(-1)], dim=-1)
        self.record.outside[record_rows] = outside.sum(-1) / count
        return weight

    def _kl(self, record_rows: Tensor, logps: Tensor, old: Tensor, reference: Tensor, in_loss: Tensor) -> Tensor:
        """The micro-batch's share of the KL in the loss, before β; records the KL."""
        algorithm = self.algorithm
        tokens = kl.estimate(algorithm.kl.estimator, logps, reference, in_loss)
        self.record.kl[record_rows] = tokens.detach().sum(-1)
        if algorithm.kl.bias_correction:
            tokens = tokens * log_ratio(logps, old, in_loss, algorithm.importance_sampling_level).exp()
        return aggregate(tokens, in_loss, algorithm.loss_agg_mode, self.totals)

    def _distilled(self, record_rows: Tensor, candidates: Tensor, teacher_top: Tensor, in_loss: Tensor) -> Tensor:
        """The micro-batch's share of the divergence from the teacher in the loss; records the divergence."""
        section = self.algorithm.teacher
        assert section is not None
        tokens = torch.where(in_loss, divergence.of_top(candidates, teacher_top, section.beta), 0.0)
        self.record.distilled[record_rows] = tokens.detach().sum(-1)
        return section.weight * aggregate(tokens, in_loss, self.algorithm.loss_agg_mode, self.totals)

    @staticmethod
    def _rows_of(values: Tensor | None, rows: Tensor, like: Tensor) -> Tensor | None:
        """Takes rows of [completions, longest], trims them to the micro-batch's width, and moves them to its device."""
        return None if values is None else devices.moved(values[rows, : like.shape[1]], like.device)


def clip_bounds(algorithm: Algorithm) -> Bounds:
    """The clip range of the section `algorithm`."""
    temperatures = (algorithm.sapo_temperature_pos, algorithm.sapo_temperature_neg)
    return Bounds(
        *(algorithm.epsilon, algorithm.upper_epsilon, algorithm.delta, *temperatures),
        (algorithm.vespo_k_pos, algorithm.vespo_lambda_pos),
        (algorithm.vespo_k_neg, algorithm.vespo_lambda_neg),
        algorithm.kl_cov_coef,
    )


def own_loss(name: str) -> Callable[..., Tensor]:
    """The user's loss with this import string; each call checks its result. It takes the arguments of `OwnLoss`, and
    others by name, of which the function gets those that it names.

    Raises:
        UserError: the function cannot be found; or, in a call, it does not return a loss for each token, or one
            without a gradient.
    """
    function = import_string.load(name)
    asked: tuple[str, ...] = ()
    with suppress(ValueError):  # a compiled function, such as by torch.jit.script, has no signature
        asked = signature_of(function).named

    def checked(logps: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        arguments = (values.clone() for values in (logps, *others))  # it may change them
        wanted = {key: values.clone() for key, values in named.items() if key in asked}
        returned = call_own("loss", name, function, *arguments, **wanted)
        loss = of_shape(returned, logps, f"algorithm.loss: {name}", "log-probs", "[completions, tokens]")
        if logps.requires_grad and not loss.requires_grad:
            raise UserError(
                f"algorithm.loss: {name} does not depend on logps, so nothing is learned; do not detach them"
            )
        return loss

    return checked
