"""Hidden states → log-probs, loss and gradient, through the vocabulary without ever holding all logits.

With z = h·Wᵀ/T (or a `Form` of it), p = softmax(z) and g_t = ∂loss/∂log π(y_t), the gradient of a token's logits is

    ∂loss/∂z_t = g_t · (onehot(y_t) − p_t)

so it can be made, multiplied into ∂loss/∂h and ∂loss/∂W and forgotten as soon as g_t is known. The loss is a sum over
sequences whose totals are fixed beforehand: g is known once a whole sequence has its log-probs. Sequences are therefore
taken some at a time, each product with the vocabulary is made once (three in all: logits, ∂h, ∂W), and nothing is
computed again. Only where one sequence alone is over the limit are its logits made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rloo_pipeline.training.packing import Pack

LossOf = Callable[[Sequence[int], Tensor, Tensor, Tensor], Tensor]
"""`(sequences, logps [n, tokens], mask [n, tokens], entropy [n, tokens]) -> scalar`: the share of these sequences in
the loss. The loss of some sequences together is the sum of their losses."""

ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits held at once, by kind of device: 128 MB and 1 GB in float32, and as much again while they are worked on."""
IN_CACHE, ROWS = 2**18, 256
"""Of these, a CPU works on what its cache holds at a time, 1 MB; but products on so many tokens that they are not
slow."""


class Form(NamedTuple):
    """How logits come from the products z of the last hidden states with the vocabulary: scale · z, or with a cap
    cap · tanh(scale · z / cap).
    """

    scale: float = 1.0
    """Of Granite (1 / logits_scaling), Cohere (logit_scale)."""
    cap: float = inf
    """Of Gemma 2 (final_logit_softcapping)."""

    def of(self, products: Tensor) -> Tensor:
        """The logits."""
        scaled = products * self.scale
        return scaled if self.cap == inf else (scaled / self.cap).tanh() * self.cap


class Parts(NamedTuple):
    """A model in two."""

    decoder: nn.Module
    projection: nn.Module
    """Onto the vocabulary; also takes a `Job`."""
    form: Form


class Job(NamedTuple):
    """What the projection is to do with hidden states."""

    pack: Pack
    temperature: float
    loss_of: LossOf | None
    """None: log-probs are all that is wanted."""
    form: Form = Form()


def attach(model: nn.Module) -> Parts | None:
    """The model's layers and its vocabulary projection, which from now on also takes a `Job`.

    None where logits are something else than a `Form` of that projection of the last hidden states, or are float16,
    whose gradients need a loss scale that is not known here.
    """
    causal: Any = model
    if hasattr(model, "peft_config"):
        causal = causal.get_base_model()
    linear = causal.get_output_embeddings()
    if type(linear) is not nn.Linear or linear.weight.dtype == torch.float16:
        return None
    form = _form(causal, linear)
    if form is None:
        return None
    linear.forward = MethodType(_project, linear)  # type: ignore[method-assign]
    return Parts(causal.base_model, linear, form)


@torch.no_grad()
def _form(causal: Any, linear: nn.Linear) -> Form | None:
    """How the model makes logits of what `linear` gives for its last hidden states: tried with products that are not
    its own, small ones for the scale and large ones for the cap.
    """
    ids = torch.ones((1, 2), dtype=torch.long, device=linear.weight.device)
    training = causal.training
    causal.eval()
    try:
        hidden = getattr(causal.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if hidden is None:
            return None
        tried = [_logits_of(causal, linear, ids, size) for size in (0.01, 1000.0)]
    finally:
        causal.train(training)
    if not all(torch.equal(hidden, seen) for seen, _, _ in tried):
        return None
    _, products, logits = tried[0]
    facts = causal.config.get_text_config()
    scale = _said(float(logits[-1] / products[-1]), facts)
    if scale is None:
        return None
    found = Form(scale, getattr(facts, "final_logit_softcapping", None) or inf)
    close = 1e-5 if logits.dtype == torch.float32 else 1e-2
    same = (torch.allclose(found.of(z.double()), made.double(), rtol=close, atol=close / 100) for _, z, made in tried)
    return found if all(same) else None


def _said(scale: float, config: Any) -> float | None:
    """The scale as config.json has it, since what was measured is rounded; None where it does not come from there."""
    said = [1.0, getattr(config, "logit_scale", None), 1 / (getattr(config, "logits_scaling", None) or inf)]
    return next((float(one) for one in said if one and abs(scale / one - 1) < 1e-2), None)


def _logits_of(causal: Any, linear: nn.Linear, ids: Tensor, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden states that `linear` sees, and products up to `size` that are given in its place with the logits
    that the model makes of them, flat.
    """
    seen: list[Tensor] = []

    def instead(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given = torch.linspace(-size, size, output.numel()).view_as(output).to(output)
        seen.extend((inputs[0], given))
        return given

    hook = linear.register_forward_hook(instead)
    try:
        logits = causal(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return seen[0], seen[1].flatten(), logits.flatten()


def _project(self: nn.Linear, hidden: Tensor, job: Job | None = None) -> Tensor:
    """In place of `nn.Linear.forward`, so that whatever DeepSpeed hooks to the module is done for us as well."""
    if job is None:
        return nn.functional.linear(hidden, self.weight, self.bias)
    if job.loss_of is None:
        return _Projection(hidden, self.weight, self.bias, job).logps()
    loss: Tensor = _Loss.apply(hidden, self.weight, self.bias, job)  # type: ignore[no-untyped-call]
    return loss


class _Loss(torch.autograd.Function):
    """The loss, whose gradient is made along with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
        work = _Projection(hidden, weight, bias, job)
        loss = work.loss(ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        ctx.found = (work.d_hidden, work.d_weight, work.d_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        return *(None if part is None else part.mul_(gradients[0].to(part.dtype)) for part in found), None


class _Projection:
    """One pass over the completion tokens of a pack."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> None:
        self.hidden, self.weight, self.bias, self.job = hidden.detach(), weight.detach(), bias, job
        self.form, vocabulary = job.form, len(weight)
        self.divisor = job.temperature / job.form.scale
        capped = job.form.cap < inf
        self.limit = max(1, ELEMENTS.get(hidden.device.type, ELEMENTS["cuda"]) // (vocabulary * (2 if capped else 1)))
        self.step = self.few = self.limit
        if hidden.device.type == "cpu":
            self.few = max(1, IN_CACHE // vocabulary)
            self.step = min(self.limit, max(ROWS, self.few))
        self.logits = hidden.new_empty((min(len(hidden), self.step), vocabulary), dtype=torch.float32)
        self.probs = self.sums = self.slopes = self.logits[:0]
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None

    def logps(self) -> Tensor:
        """[completion tokens] float32."""
        found = self.hidden.new_empty(len(self.hidden), dtype=torch.float32)
        for part in self._parts(slice(0, len(found))):
            logits = self._logits(part)
            normalizers = torch.cat([some.logsumexp(-1) for some in logits.split(self.few)])
            found[part] = self._of_targets(logits, part) - normalizers
        return found

    def loss(self, for_weight: bool, for_bias: bool) -> Tensor:
        """The loss of all sequences; its gradients are left in d_hidden, d_weight and d_bias."""
        held = min(len(self.hidden), self.limit)
        self.probs = self.logits.new_empty(held, len(self.weight))
        self.sums = self.logits.new_empty(held, 1)
        if self.form.cap < inf:
            self.slopes = torch.empty_like(self.probs)
        self.d_hidden = torch.zeros_like(self.hidden)
        if for_weight:
            self.d_weight = torch.zeros_like(self.weight, dtype=torch.float32)
        if for_bias and self.bias is not None:
            self.d_bias = torch.zeros_like(self.bias, dtype=torch.float32)
        total = self.hidden.new_zeros((), dtype=torch.float32)
        lengths = self.job.pack.completion_lengths.tolist()
        for sequences, tokens in _groups(lengths, self.limit):
            parts, start = self._parts(tokens), tokens.start
            whole = tokens.stop - start <= self.limit
            seen = [self._see(part, part.start - start if whole else 0) for part in parts]
            loss, gradient = self._gradient(sequences, *(torch.cat(values) for values in zip(*seen, strict=True)))
            total += loss
            if gradient.any():
                for part in parts:
                    if not whole:
                        self._see(part, 0)
                    own = gradient[part.start - start : part.stop - start]
                    self._push(part, part.start - start if whole else 0, own)
        self.d_weight = None if self.d_weight is None else self.d_weight.to(self.weight.dtype)
        self.d_bias = None if self.d_bias is None or self.bias is None else self.d_bias.to(self.bias.dtype)
        return total

    def _parts(self, tokens: slice) -> list[slice]:
        """Cut into what is worked on at a time."""
        return [
            slice(start, min(start + self.step, tokens.stop)) for start in range(tokens.start, tokens.stop, self.step)
        ]

    def _logits(self, part: slice) -> Tensor:
        """Of some tokens, divided by the temperature, float32, in the buffer for them."""
        hidden, into = self.hidden[part], self.logits[: part.stop - part.start]
        if hidden.dtype == torch.float32:
            torch.mm(hidden, self.weight.T, out=into)
        else:
            into.copy_(hidden @ self.weight.T)
        if self.bias is not None:
            into += self.bias
        if self.form.cap < inf:
            into.mul_(self.form.scale / self.form.cap).tanh_().mul_(self.form.cap / self.job.temperature)
        elif self.divisor != 1:
            into.div_(self.divisor)
        return into

    def _of_targets(self, values: Tensor, part: slice) -> Tensor:
        return values.gather(-1, self.job.pack.targets[part].unsqueeze(-1)).squeeze(-1)

    def _see(self, part: slice, place: int) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of some tokens; exp(z − max z) and its sum are left at a place of their buffers."""
        logits = self._logits(part)
        at_targets, these = self._of_targets(logits, part), slice(place, place + len(logits))
        if self.form.cap < inf:  # tanh' = 1 − tanh²
            torch.mul(logits, self.job.temperature / self.form.cap, out=self.slopes[these]).square_().neg_().add_(1)
        blocks = zip(*(all_of.split(self.few) for all_of in (logits, self.probs[these], self.sums[these])), strict=True)
        largest, mean = (torch.cat(values) for values in zip(*(_exponentials(*block) for block in blocks), strict=True))
        total = self.sums[these].squeeze(-1)
        log_total = total.log()
        return at_targets - (largest + log_total), log_total - mean / total

    def _gradient(self, sequences: range, logps: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of some sequences, and what it gives by each log-prob."""
        assert self.job.loss_of is not None
        lengths = self.job.pack.completion_lengths[sequences.start : sequences.stop]
        pack = self.job.pack._replace(completion_lengths=lengths)
        with torch.enable_grad():
            leaf = logps.requires_grad_()
            padded, mask = pack.unpack(leaf)
            loss = self.job.loss_of(sequences, padded, mask, pack.unpack(entropy)[0])
            (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    def _push(self, part: slice, place: int, gradient: Tensor) -> None:
        """Takes some tokens' gradient on to hidden states and weights; what was left of them is used up."""
        assert self.d_hidden is not None
        hidden, scale = self.hidden[part], gradient / self.divisor
        scale = scale.unsqueeze(-1)
        at_logits = self.probs[place : place + len(hidden)]
        at_logits *= -scale / self.sums[place : place + len(hidden)]
        at_logits.scatter_add_(-1, self.job.pack.targets[part].unsqueeze(-1), scale)
        if self.form.cap < inf:
            at_logits *= self.slopes[place : place + len(hidden)]
        if self.d_bias is not None:
            self.d_bias += at_logits.sum(0)
        at_logits = at_logits.to(self.weight.dtype)
        self.d_hidden[part] = at_logits @ self.weight
        if self.d_weight is not None and hidden.dtype == torch.float32:
            self.d_weight.addmm_(at_logits.T, hidden)
        elif self.d_weight is not None:
            self.d_weight += at_logits.T @ hidden


def _exponentials(logits: Tensor, probs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """max z and Σ exp(z − max z)·(z − max z) of some tokens; exp(z − max z) and its sum are left in `probs` and `sums`,
    logits are used up.
    """
    largest = logits.amax(-1, keepdim=True)
    torch.exp(logits.sub_(largest), out=probs)
    torch.sum(probs, -1, keepdim=True, out=sums)
    return largest.squeeze(-1), logits.mul_(probs).sum(-1)


def _groups(lengths: Sequence[int], limit: int) -> Iterator[tuple[range, slice]]:
    """Neighbouring sequences of at most `limit` tokens together (or a longer one alone): which, and their tokens."""
    first = start = stop = 0
    for place, length in enumerate(lengths):
        if stop > start and stop + length - start > limit:
            yield range(first, place), slice(start, stop)
            first, start = place, stop
        stop += length
    yield range(first, len(lengths)), slice(start, stop)
