"""RMSNorm, rotary embedding and SwiGLU with fewer passes over memory, for float32 on CPUs.

In a small model these layers, not the large matrix products, take most of an optimizer step: PyTorch writes and reads a
tensor for each operation, and autograd keeps most of them. Here the gradients are derived by hand, with x̂ = x·r and
r = (mean(x²) + ε)^-½:

    RMSNorm   y = w ∘ x̂                     ∂x = r · (w∘∂y − x̂ · mean(w∘∂y∘x̂)),  ∂w = Σ ∂y∘x̂
    rotary    y = x∘cos + rotated(x)∘sin    ∂x = ∂y∘cos − rotated(∂y)∘sin
    SwiGLU    y = (silu(x·Gᵀ) ∘ x·Uᵀ)·Dᵀ    a few tokens at a time, so that intermediate results stay in cache

`install` replaces a layer only after a trial shows that it computes the same function; names do not decide. Other
layers, other number formats and GPUs keep their own code. Sources: Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021
(rotary), Shazeer 2020 (SwiGLU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

CHUNK_ELEMENTS = 2**16
"""Elements of a tensor that are processed at once: 256 KB, so that a few such tensors fit a core's cache."""
MIN_TOKENS = 256
"""Fewest tokens of a chunk; matrix products on fewer tokens are slow."""
ROTARY = "apply_rotary_pos_emb"
"""Name of the function in a transformers module that its attention layers call."""
PLAIN = "plain_forward"
"""Attribute that holds what was replaced."""


def install(model: nn.Module) -> None:
    """Replaces the forward of a model's layers that compute the functions above."""
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
def disabled() -> Iterator[None]:
    """A block with transformers' own rotary functions, which models of one module share.

    A model without installed layers then runs transformers' code only.
    """
    functions = {module: vars(module).get(ROTARY) for module in list(sys.modules.values()) if module is not None}
    replaced = {module: function for module, function in functions.items() if hasattr(function, PLAIN)}
    for module, function in replaced.items():
        setattr(module, ROTARY, getattr(function, PLAIN))
    try:
        yield
    finally:
        for module, function in replaced.items():
            setattr(module, ROTARY, function)


def _replace(layer: Any, forward: Callable[..., Tensor]) -> None:
    setattr(layer, PLAIN, layer.forward)
    layer.forward = MethodType(forward, layer)


def _is_supported(*tensors: Tensor) -> bool:
    """Whether all are float32 on a CPU and not partitioned by ZeRO 3."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 and not hasattr(t, "ds_id") for t in tensors)


def _same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def _trial_input(size: int) -> Tensor:
    """[2, size], to try a layer with."""
    return torch.linspace(-2, 3, 2 * size).sin().view(2, size)


# -- RMSNorm ----------------------------------------------------------------------------------------------------------


def _norm(self: Any, hidden: Tensor) -> Tensor:
    if not _is_supported(hidden, self.weight):
        return self.plain_forward(hidden)  # type: ignore[no-any-return]
    return _Norm.apply(hidden, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call, no-any-return]


@torch.no_grad()
def _is_norm(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not _is_supported(weight):
        return False
    if len(signature(layer.forward).parameters) != 1:  # Mamba 2: a gate as well
        return False
    hidden = _trial_input(len(weight))
    return _same(_norm(layer, hidden), layer(hidden))


class _Norm(torch.autograd.Function):
    """[…, size] → […, size]."""

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
        d_weight = torch.mv(flat.T, scale.flatten())
        along = torch.mv(flat, weight).div_(-len(weight)).view(scale.shape) * scale**3
        d_hidden = torch.mul(gradients[0], weight, out=product).mul_(scale).addcmul_(hidden, along)
        return d_hidden, d_weight, None


# -- rotary position embedding ----------------------------------------------------------------------------------------


def _replace_rotary(module: ModuleType) -> None:
    """Replaces the rotary function of a module if it computes the function above."""
    plain = getattr(module, ROTARY)
    if hasattr(plain, PLAIN):
        return

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if rest or options or cos.shape[-1] != q.shape[-1] or not _is_supported(q, k, cos, sin):
            return plain(q, k, cos, sin, *rest, **options)  # type: ignore[no-any-return]
        return _Rotary.apply(q, k, cos.unsqueeze(1), sin.unsqueeze(1))  # type: ignore[no-untyped-call, no-any-return]

    if _is_rotary(plain, rotary):
        setattr(rotary, PLAIN, plain)
        setattr(module, ROTARY, rotary)


def _is_rotary(plain: Callable[..., Any], ours: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    query, key = (_trial_input(24).view(1, 2, 3, 8) * scale for scale in (1, 3))
    cos, sin = (_trial_input(12).view(1, 3, 8) * scale for scale in (2, 5))
    try:
        expected = plain(query, key, cos, sin)
        return all(_same(a, b) for a, b in zip(ours(query, key, cos, sin), expected, strict=True))
    except (TypeError, ValueError, RuntimeError):  # the function takes other arguments
        return False


class _Rotary(torch.autograd.Function):
    """Rotates queries and keys, [1, heads, tokens, head_dim], by cos and sin of [1, 1, tokens, head_dim]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation: sin changes its sign, and its halves swap
        swapped = torch.cat(sin.chunk(2, -1)[::-1], -1).neg_()
        return _rotated(gradients[0], cos, swapped), _rotated(gradients[1], cos, swapped), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) ↦ (a∘cos_a − b∘sin_a, b∘cos_b + a∘sin_b) in the halves of each head.

    Products and sums are rounded separately, not fused, so the result equals transformers' bit for bit.
    """
    out = torch.mul(heads, cos, out=torch.empty_like(heads))
    (a, b), (out_a, out_b), (sin_a, sin_b) = (tensor.chunk(2, -1) for tensor in (heads, out, sin))
    out_a.sub_(b * sin_a)
    out_b.add_(a * sin_b)
    return out


# -- SwiGLU -----------------------------------------------------------------------------------------------------------


def _swiglu(self: Any, hidden: Tensor) -> Tensor:
    parts = self.gate_proj, self.up_proj, self.down_proj
    weights = [part.weight for part in parts if type(part) is nn.Linear]  # LoRA may have wrapped a part since
    if len(weights) < len(parts) or not _is_supported(hidden, *weights):
        return self.plain_forward(hidden)  # type: ignore[no-any-return]
    return _SwiGLU.apply(hidden, *weights)  # type: ignore[no-untyped-call, no-any-return]


@torch.no_grad()
def _is_swiglu(layer: Any) -> bool:
    parts = [getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear and part.bias is None and _is_supported(part.weight) for part in parts):
        return False
    hidden = _trial_input(layer.gate_proj.in_features)
    return _same(_swiglu(layer, hidden), layer(hidden))


class _SwiGLU(torch.autograd.Function):
    """[…, size] → […, size]. x·Gᵀ and x·Uᵀ are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = flat.new_empty(*hidden.shape[:-1], len(down))  # not a view, so that callers may add to it in place
        rows = out.view(len(flat), len(down))
        saved = list[Tensor]()
        for chunk in _chunks(len(flat), len(gate)):
            gated, raised = linear(flat[chunk], gate), linear(flat[chunk], up)
            torch.mm(silu(gated).mul_(raised), down.T, out=rows[chunk])
            saved += gated, raised
        ctx.save_for_backward(flat, gate, up, down, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, gate, up, down, *saved = ctx.saved_tensors
        d_out = gradients[0].reshape(len(flat), -1)
        d_hidden = torch.empty_like(flat)
        d_gate, d_up, d_down = (
            torch.zeros_like(weight) if needed else None
            for weight, needed in zip((gate, up, down), ctx.needs_input_grad[1:], strict=True)
        )
        for chunk, gated, raised in zip(_chunks(len(flat), len(gate)), saved[::2], saved[1::2], strict=True):
            active, d_product = silu(gated), d_out[chunk] @ down
            if d_down is not None:
                d_down.addmm_(d_out[chunk].T, active * raised)
            d_gated = torch.ops.aten.silu_backward(d_product * raised, gated)
            d_raised = d_product.mul_(active)
            if d_gate is not None:
                d_gate.addmm_(d_gated.T, flat[chunk])
            if d_up is not None:
                d_up.addmm_(d_raised.T, flat[chunk])
            torch.mm(d_gated, gate, out=d_hidden[chunk]).addmm_(d_raised, up)
        return d_hidden.view(*gradients[0].shape[:-1], -1), d_gate, d_up, d_down


def _chunks(tokens: int, width: int) -> list[slice]:
    """Slices of tokens of about CHUNK_ELEMENTS elements."""
    size = max(MIN_TOKENS, CHUNK_ELEMENTS // width)
    return [slice(first, first + size) for first in range(0, tokens, size)]
