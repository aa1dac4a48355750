"""A model's small layers in fewer passes over memory, for float32 on CPUs, where they and not the products take most of
a small model's step.

PyTorch writes and reads a tensor for each operation, and autograd keeps most of them. Three layers that nearly every
language model has are made here with their gradients worked out, x̂ = x·r and r = (mean(x²) + ε)^-½:

    RMSNorm   y = w ∘ x̂                     ∂x = r · (w∘∂y − x̂ · mean(w∘∂y∘x̂)),  ∂w = Σ ∂y∘x̂
    rotary    y = x∘cos + rotated(x)∘sin    ∂x = ∂y∘cos − rotated(∂y)∘sin
    SwiGLU    y = (silu(x·Gᵀ) ∘ x·Uᵀ)·Dᵀ    some tokens at a time, so that what is between the products stays in cache

`install` takes a model's own layers where they compute just this, which is tried and not told by their names; others,
and what is not float32 on a CPU, stay as they are. Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary), Shazeer
2020 (SwiGLU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

AT_ONCE = 2**16
"""Numbers of a tensor that are worked on at once: 256 KB, and a few such tensors in a core's cache."""
FEWEST = 256
"""Tokens at once below which a product is slow."""
ROTARY = "apply_rotary_pos_emb"
"""By this name transformers' attention layers find the function in their module."""
PLAIN = "plain_forward"
"""By this name what is replaced is kept."""


def install(model: nn.Module) -> None:
    """Has the model's layers computed as above, those that are the same."""
    for layer in model.modules():
        if hasattr(layer, PLAIN):
            continue
        if hasattr(layer, "variance_epsilon") and _is_norm(layer):
            _replace(layer, _norm)
        elif hasattr(layer, "gate_proj") and _is_swiglu(layer):
            _replace(layer, _swiglu)
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        if hasattr(module, ROTARY):
            _replace_rotary(module)


@contextmanager
def plainly() -> Iterator[None]:
    """A block in which models that nothing was installed in are wholly transformers' own: the functions too that they
    share with others of their module.
    """
    ours = {module: vars(module).get(ROTARY) for module in list(sys.modules.values()) if module is not None}
    ours = {module: function for module, function in ours.items() if hasattr(function, PLAIN)}
    for module, function in ours.items():
        setattr(module, ROTARY, getattr(function, PLAIN))
    try:
        yield
    finally:
        for module, function in ours.items():
            setattr(module, ROTARY, function)


def _replace(layer: Any, forward: Callable[..., Tensor]) -> None:
    setattr(layer, PLAIN, layer.forward)
    layer.forward = MethodType(forward, layer)


def _fits(*tensors: Tensor) -> bool:
    """Whether all are float32 on a CPU, and whole (ZeRO 3 has weights elsewhere between their layers' own calls)."""
    return all(one.device.type == "cpu" and one.dtype == torch.float32 and not hasattr(one, "ds_id") for one in tensors)


def _same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def _tokens(size: int) -> Tensor:
    """Something to try a layer with, [2, size]."""
    return torch.linspace(-2, 3, 2 * size).sin().view(2, size)


# -- RMSNorm ----------------------------------------------------------------------------------------------------------


def _norm(self: Any, hidden: Tensor) -> Tensor:
    if not _fits(hidden, self.weight):
        return self.plain_forward(hidden)  # type: ignore[no-any-return]
    return _Norm.apply(hidden, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call, no-any-return]


@torch.no_grad()
def _is_norm(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not _fits(weight):
        return False
    tokens = _tokens(len(weight))
    try:
        return _same(_norm(layer, tokens), layer(tokens))
    except TypeError:  # it takes something else as well
        return False


class _Norm(torch.autograd.Function):
    """[…, size] → the same."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        scale.square_().div_(len(weight)).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        out: Tensor = (hidden * scale).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        product = gradients[0] * hidden
        flat = product.reshape(-1, len(weight))
        at_weight = torch.mv(flat.T, scale.flatten())
        along = torch.mv(flat, weight).div_(-len(weight)).view(scale.shape) * scale**3
        at_hidden = torch.mul(gradients[0], weight, out=product).mul_(scale).addcmul_(hidden, along)
        return at_hidden, at_weight, None


# -- rotary position embedding ----------------------------------------------------------------------------------------


def _replace_rotary(module: ModuleType) -> None:
    """Has a module's attention layers call ours, if theirs is the same."""
    plain = getattr(module, ROTARY)
    if hasattr(plain, PLAIN):
        return

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if others or named or cos.shape[-1] != q.shape[-1] or not _fits(q, k, cos, sin):
            return plain(q, k, cos, sin, *others, **named)  # type: ignore[no-any-return]
        return _Rotary.apply(q, k, cos.unsqueeze(1), sin.unsqueeze(1))  # type: ignore[no-untyped-call, no-any-return]

    if _is_rotary(plain, rotary):
        setattr(rotary, PLAIN, plain)
        setattr(module, ROTARY, rotary)


def _is_rotary(plain: Callable[..., Any], ours: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    query, key = (_tokens(24).view(1, 2, 3, 8) * scale for scale in (1, 3))
    cos, sin = (_tokens(12).view(1, 3, 8) * scale for scale in (2, 5))
    try:
        found = plain(query, key, cos, sin)
        return all(_same(one, other) for one, other in zip(ours(query, key, cos, sin), found, strict=True))
    except (TypeError, ValueError, RuntimeError):  # it takes something else
        return False


class _Rotary(torch.autograd.Function):
    """Queries and keys, [1, heads, tokens, size] → the same, by cos and sin of [1, 1, tokens, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # what went into the one half by sin comes back out of the other, with the other sign
        swapped = torch.cat(sin.chunk(2, -1)[::-1], -1).neg_()
        return _rotated(gradients[0], cos, swapped), _rotated(gradients[1], cos, swapped), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) ↦ (a∘cos_a − b∘sin_a, b∘cos_b + a∘sin_b) in the halves of each head.

    Products and sums are rounded one by one, not fused, which gives transformers' numbers bit for bit.
    """
    out = torch.mul(heads, cos, out=torch.empty_like(heads))
    (a, b), (at_a, at_b), (sin_a, sin_b) = (one.chunk(2, -1) for one in (heads, out, sin))
    at_a.sub_(b * sin_a)
    at_b.add_(a * sin_b)
    return out


# -- SwiGLU -----------------------------------------------------------------------------------------------------------


def _swiglu(self: Any, hidden: Tensor) -> Tensor:
    parts = self.gate_proj, self.up_proj, self.down_proj
    weights = [part.weight for part in parts if type(part) is nn.Linear]  # an adapter may have come since
    if len(weights) < len(parts) or not _fits(hidden, *weights):
        return self.plain_forward(hidden)  # type: ignore[no-any-return]
    return _SwiGLU.apply(hidden, *weights)  # type: ignore[no-untyped-call, no-any-return]


@torch.no_grad()
def _is_swiglu(layer: Any) -> bool:
    parts = [getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear and part.bias is None and _fits(part.weight) for part in parts):
        return False
    tokens = _tokens(layer.gate_proj.in_features)
    return _same(_swiglu(layer, tokens), layer(tokens))


class _SwiGLU(torch.autograd.Function):
    """[…, size] → the same. Of what is between the products, x·Gᵀ and x·Uᵀ are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = flat.new_empty(*hidden.shape[:-1], len(down))  # whole, and no view, which nobody could add to in place
        rows = out.view(len(flat), len(down))
        kept = list[Tensor]()
        for part in _parts(len(flat), len(gate)):
            gated, raised = linear(flat[part], gate), linear(flat[part], up)
            torch.mm(silu(gated).mul_(raised), down.T, out=rows[part])
            kept += gated, raised
        ctx.save_for_backward(flat, gate, up, down, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, gate, up, down, *kept = ctx.saved_tensors
        at_out = gradients[0].reshape(len(flat), -1)
        at_hidden = torch.empty_like(flat)
        at_gate, at_up, at_down = (
            torch.zeros_like(weight) if needed else None
            for weight, needed in zip((gate, up, down), ctx.needs_input_grad[1:], strict=True)
        )
        for part, gated, raised in zip(_parts(len(flat), len(gate)), kept[::2], kept[1::2], strict=True):
            active, at_product = silu(gated), at_out[part] @ down
            if at_down is not None:
                at_down.addmm_(at_out[part].T, active * raised)
            at_gated = torch.ops.aten.silu_backward(at_product * raised, gated)
            at_raised = at_product.mul_(active)
            if at_gate is not None:
                at_gate.addmm_(at_gated.T, flat[part])
            if at_up is not None:
                at_up.addmm_(at_raised.T, flat[part])
            torch.mm(at_gated, gate, out=at_hidden[part]).addmm_(at_raised, up)
        return at_hidden.view(*gradients[0].shape[:-1], -1), at_gate, at_up, at_down


def _parts(tokens: int, width: int) -> list[slice]:
    """Slices of tokens that have few enough numbers."""
    size = max(FEWEST, AT_ONCE // width)
    return [slice(first, first + size) for first in range(0, tokens, size)]
