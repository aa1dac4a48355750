"""Log-probs, loss and gradient from hidden states, without ever holding the logits of all tokens.

With z = h·Wᵀ/T (or a `Form` of it), p = softmax(z) and g_t = ∂loss/∂log π(y_t), the gradient of a token's logits is

    ∂loss/∂z_t = g_t · (onehot(y_t) − p_t)

so it can be computed, multiplied into ∂loss/∂h and ∂loss/∂W and discarded as soon as g_t is known. The loss is a sum
over sequences whose totals are fixed beforehand, so g is known once a whole sequence has its log-probs. The tokens are
therefore processed a few sequences at a time: each product with the vocabulary is computed once (three in all: logits,
∂h, ∂W), and nothing is recomputed. Only a single sequence over the limit has its logits computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import inf
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rloo_pipeline.training.packing import Pack

LossOf = Callable[..., Float[Tensor, ""]]
"""`(sequences, logps, mask, entropy) -> share of these sequences in the loss`, with tensors [n, tokens]. If the pack
has `candidates`, their log-probs [n, tokens, K] follow. The loss of several sequences is the sum of their losses."""

ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Maximum number of logits held at once, by device type: 128 MB and 1 GB in float32. The computation takes as much
again."""
IN_CACHE = 2**18
"""Number of logits that a CPU processes at once: 1 MB, which stays in its cache."""
MIN_ROWS = 256
"""Minimum number of tokens in a matrix product on a CPU; smaller products are slow."""


class Form(NamedTuple):
    """Formula of logits from products z: scale · z, or with a cap, cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    """Granite: 1 / logits_scaling; Cohere: logit_scale."""
    cap: float = inf
    """Gemma 2: final_logit_softcapping."""

    def logits(self, products: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The logits of these products."""
        scaled = products * self.scale
        return scaled if self.cap == inf else (scaled / self.cap).tanh() * self.cap


class TokenOutputs(NamedTuple):
    """Values of the completion tokens of a pack in float32; None for what was not asked for."""

    logps: Float[Tensor, " completion_tokens"]
    entropies: Float[Tensor, " completion_tokens"] | None = None
    """Entropies of the distributions that the tokens are sampled from, in nats."""
    top_logps: Float[Tensor, "completion_tokens K"] | None = None
    """Log-probs of the K likeliest tokens at each position, largest first."""
    top_ids: Int[Tensor, "completion_tokens K"] | None = None


class HeadInputs(NamedTuple):
    """Inputs of the head besides the hidden states."""

    pack: Pack
    temperature: float
    loss_of: LossOf | None
    """The loss to compute; None computes `TokenOutputs`."""
    form: Form = Form()
    never: tuple[int, ...] = ()
    """Tokens that are never sampled: their probability is 0."""
    top_k: int = 0
    """Number of likeliest tokens to return at each position; without a loss."""
    entropies: bool = False
    """True to return entropies too; without a loss."""


KIND = "rloo_projection"
"""Attribute of a head: the subclass of `Projection` that computes its losses, unless it has a bias or a cap (phi-2,
Gemma 2).
"""
NEVER = -1e30
"""A finite logit whose exponential is 0, so that 0 times it is 0."""


def use(head: nn.Linear) -> None:
    """Makes a vocabulary projection accept `HeadInputs`."""
    head.forward = MethodType(_forward, head)  # type: ignore[method-assign]


def _forward(
    self: nn.Linear, hidden: Float[Tensor, "*batch hidden"], inputs: HeadInputs | None = None
) -> Float[Tensor, "*shape"] | TokenOutputs:
    """Replaces `nn.Linear.forward`, so that DeepSpeed's hooks on the module run for this computation too."""
    if inputs is None:
        return nn.functional.linear(hidden, self.weight, self.bias)
    plain = self.bias is None and inputs.form.cap == inf
    kind: type[Projection] = getattr(self, KIND, Projection) if plain else Projection
    if inputs.loss_of is None:
        outputs = kind(hidden, self.weight, self.bias, inputs).outputs()
        whole: list[Any] = [None if part is None else inputs.pack.whole(part) for part in outputs]
        return TokenOutputs(*whole)
    loss: Tensor = _Loss.apply(hidden, self.weight, self.bias, inputs, kind)  # type: ignore[no-untyped-call]
    return loss


class _Loss(torch.autograd.Function):
    """The loss; its gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: HeadInputs, kind: type[Projection]
    ) -> Tensor:
        projection = kind(hidden, weight, bias, inputs)
        loss = projection.loss(ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        ctx.gradients = (projection.d_hidden, projection.d_weight, projection.d_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        computed, ctx.gradients = ctx.gradients, None
        return *(None if part is None else part.mul_(gradients[0].to(part.dtype)) for part in computed), None, None


class Projection:
    """One pass over the completion tokens of a pack."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: HeadInputs) -> None:
        self.hidden, self.weight, self.bias, self.inputs = hidden.detach(), weight.detach(), bias, inputs
        self.form, vocabulary = inputs.form, len(weight)
        self.divisor = inputs.temperature / inputs.form.scale
        capped = inputs.form.cap < inf
        self.dtype, elements = self.held_at_once()
        group = inputs.pack.layout.group
        self.limit = max(1, elements // (vocabulary * (2 if capped else 1)) // (1 if group is None else group.size))
        self.step = self.cached = self.limit
        if hidden.device.type == "cpu":
            self.cached = max(1, IN_CACHE // vocabulary)
            self.step = min(self.limit, max(MIN_ROWS, self.cached))
        pack = inputs.pack
        targets = pack.targets.unsqueeze(-1)
        self.columns = targets if pack.candidates is None else torch.cat([targets, pack.candidates], -1)
        """[completion_tokens, 1 + K]: ids whose log-probs the loss gets."""
        self.probs = self.sums = self.slopes = hidden.new_empty(0, dtype=torch.float32)
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None

    def held_at_once(self) -> tuple[torch.dtype, int]:
        """Number format of the logits held at once, and their maximum number."""
        return torch.float32, ELEMENTS.get(self.hidden.device.type, ELEMENTS["cuda"])

    @cached_property
    def logits(self) -> Float[Tensor, "rows vocabulary"]:
        """A buffer for the logits of a slice."""
        return self.hidden.new_empty((min(len(self.hidden), self.step), len(self.weight)), dtype=self.dtype)

    def outputs(self) -> TokenOutputs:
        """Log-probs, and what else `inputs` asks for."""
        # with entropies in the groups of `loss`, so that a policy's ratio to itself is 1
        groups = self._groups() if self.inputs.entropies else [(range(0), slice(0, len(self.hidden)))]
        parts = (self._outputs(part) for _, tokens in groups for part in self._parts(tokens))
        joined: list[Any] = [None if of[0] is None else torch.cat(of) for of in zip(*parts, strict=True)]
        return TokenOutputs(*joined)

    def _outputs(self, part: slice) -> TokenOutputs:
        if self.inputs.entropies:
            if not len(self.probs):
                self._make_room(self.step)
            logps, entropies = self._softmax(part, 0)
            return TokenOutputs(logps[:, 0], entropies)
        logits = self._logits(part)
        normalizers = torch.cat([rows.logsumexp(-1) for rows in logits.split(self.cached)])
        return outputs_of(logits, self.columns[part, 0], normalizers, self.inputs.top_k)

    def _make_room(self, most: int) -> None:
        """Makes the buffers for the softmax of up to `most` tokens."""
        rows = min(len(self.hidden), most)
        self.probs = self.hidden.new_empty((rows, len(self.weight)), dtype=self.dtype)
        self.sums = self.hidden.new_empty((rows, 1), dtype=torch.float32)
        if self.form.cap < inf:
            self.slopes = torch.empty_like(self.probs)

    def _groups(self) -> Iterable[tuple[range, slice]]:
        """Groups of sequences whose softmax is held at once, and their tokens."""
        lengths = self.inputs.pack.completion_lengths.tolist()
        if self.inputs.pack.own is None:
            return _groups(lengths, self.limit)
        return [(range(len(lengths)), slice(0, len(self.hidden)))]  # spread over ranks, so all go together

    def loss(self, for_weight: bool, for_bias: bool) -> Float[Tensor, ""]:
        """The loss of all sequences; leaves its gradients in d_hidden, d_weight and d_bias."""
        self._make_room(self.limit)
        self.d_hidden = torch.zeros_like(self.hidden)
        if for_weight:
            self.d_weight = torch.zeros_like(self.weight, dtype=torch.float32)
        if for_bias and self.bias is not None:
            self.d_bias = torch.zeros_like(self.bias, dtype=torch.float32)
        total = self.hidden.new_zeros((), dtype=torch.float32)
        for sequences, tokens in self._groups():
            total += self._backward_group(sequences, tokens)
        self.d_weight = None if self.d_weight is None else self.d_weight.to(self.weight.dtype)
        self.d_bias = None if self.d_bias is None or self.bias is None else self.d_bias.to(self.bias.dtype)
        return total

    def _backward_group(self, sequences: range, tokens: slice) -> Tensor:
        """Computes the loss of neighbouring sequences and adds their gradients."""
        parts, start = self._parts(tokens), tokens.start
        fits = tokens.stop - start <= self.limit
        values = [self._softmax(part, part.start - start if fits else 0) for part in parts]
        pack, joined = self.inputs.pack, (torch.cat(tensors) for tensors in zip(*values, strict=True))
        loss, gradient = self._loss_gradient(sequences, *map(pack.whole, joined))
        if pack.own is not None:
            gradient = gradient.index_select(0, pack.own.mine)
        if gradient.device.type != "cpu" or gradient.any():  # on a GPU, this test would wait for it
            for part in parts:
                if not fits:
                    self._softmax(part, 0)
                gradient_of_part = gradient[part.start - start : part.stop - start]
                self._backward_part(part, part.start - start if fits else 0, gradient_of_part)
        return loss

    def _parts(self, tokens: slice) -> list[slice]:
        """Splits tokens into slices that are processed at once; one empty slice if there are no tokens."""
        starts = range(tokens.start, max(tokens.stop, tokens.start + 1), self.step)
        return [slice(start, min(start + self.step, tokens.stop)) for start in starts]

    def _logits(self, part: slice) -> Tensor:
        """Logits of a slice of tokens, divided by the temperature, float32, in the buffer `logits`."""
        hidden, out = self.hidden[part], self.logits[: part.stop - part.start]
        if hidden.dtype == torch.float32:
            torch.mm(hidden, self.weight.T, out=out)
        else:
            out.copy_(hidden @ self.weight.T)
        if self.bias is not None:
            out += self.bias
        if self.form.cap < inf:
            out.mul_(self.form.scale / self.form.cap).tanh_().mul_(self.form.cap / self.inputs.temperature)
        elif self.divisor != 1:
            out.div_(self.divisor)
        for token in self.inputs.never:
            out[:, token] = NEVER
        return out

    def _softmax(self, part: slice, offset: int) -> tuple[Tensor, Tensor]:
        """Log-probs [tokens, 1 + K] and entropies of a slice; leaves exp(z − max z) and its sum in the buffers."""
        logits = self._logits(part)
        at_columns, rows = logits.gather(-1, self.columns[part]), slice(offset, offset + len(logits))
        if self.form.cap < inf:  # tanh' = 1 − tanh²
            torch.mul(logits, self.inputs.temperature / self.form.cap, out=self.slopes[rows])
            self.slopes[rows].square_().neg_().add_(1).clamp_(min=0)  # tokens that are never sampled have none
        buffers = logits, self.probs[rows], self.sums[rows]
        blocks = zip(*(buffer.split(self.cached) for buffer in buffers), strict=True)
        largest, mean = (torch.cat(values) for values in zip(*(exponentials(*block) for block in blocks), strict=True))
        total = self.sums[rows].squeeze(-1)
        log_total = total.log()
        return at_columns - (largest + log_total).unsqueeze(-1), log_total - mean / total

    def _loss_gradient(self, sequences: range, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of some sequences and its gradient with respect to each log-prob."""
        assert self.inputs.loss_of is not None
        lengths = self.inputs.pack.completion_lengths[sequences.start : sequences.stop]
        pack = self.inputs.pack._replace(completion_lengths=lengths)
        with torch.enable_grad():
            leaf = logps.requires_grad_()
            padded, mask = pack.unpack(leaf[:, 0])
            others = () if pack.candidates is None else (pack.unpack(leaf[:, 1:])[0],)
            loss = self.inputs.loss_of(sequences, padded, mask, pack.unpack(entropy)[0], *others)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    def _backward_part(self, part: slice, offset: int, gradient: Tensor) -> None:
        """Adds the gradient of a slice of tokens to hidden states and weights; overwrites its softmax."""
        assert self.d_hidden is not None
        hidden = self.hidden[part]
        d_logits = self._d_logits(part, slice(offset, offset + len(hidden)), gradient / self.divisor)
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0)
        d_logits = d_logits.to(self.weight.dtype)
        self.d_hidden[part] = d_logits @ self.weight
        if self.d_weight is not None and hidden.dtype == torch.float32:
            self.d_weight.addmm_(d_logits.T, hidden)
        elif self.d_weight is not None:
            self.d_weight += d_logits.T @ hidden

    def _d_logits(self, part: slice, rows: slice, scale: Tensor) -> Tensor:
        """The gradient of a slice's logits, given that its softmax is in these rows of the buffers."""
        d_logits = self.probs[rows]
        d_logits *= -scale.sum(-1, keepdim=True) / self.sums[rows]
        # the target can also be a candidate, so it is added separately: a GPU then adds in a fixed order
        for columns in (slice(0, 1), slice(1, None)):
            d_logits.scatter_add_(-1, self.columns[part, columns], scale[:, columns])
        if self.form.cap < inf:
            d_logits *= self.slopes[rows]
        return d_logits


def _groups(lengths: Sequence[int], limit: int) -> Iterator[tuple[range, slice]]:
    """Groups neighbouring sequences up to `limit` tokens (a longer one alone); yields their indices and tokens."""
    first = start = stop = 0
    for i, length in enumerate(lengths):
        if stop > start and stop + length - start > limit:
            yield range(first, i), slice(start, stop)
            first, start = i, stop
        stop += length
    yield range(first, len(lengths)), slice(start, stop)


def outputs_of(logits: Tensor, targets: Tensor, normalizers: Tensor, top_k: int) -> TokenOutputs:
    """Log-probs, and the likeliest tokens if any are wanted, of logits [tokens, vocabulary] with log Σ exp of each
    row.
    """
    logps = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizers
    if not top_k:
        return TokenOutputs(logps)
    largest, ids = logits.topk(top_k, -1)
    return TokenOutputs(logps, None, largest - normalizers.unsqueeze(-1), ids.int())


def exponentials(logits: Tensor, probs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """max z and Σ exp(z − max z)·(z − max z) of some tokens.

    Writes exp(z − max z) into `probs` and its sum into `sums`, and overwrites `logits`.
    """
    largest = logits.amax(-1, keepdim=True)
    torch.exp(logits.sub_(largest), out=probs)
    torch.sum(probs, -1, keepdim=True, out=sums)
    return largest.squeeze(-1), logits.mul_(probs).sum(-1)
