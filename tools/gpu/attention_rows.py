"""A row that compares the attention of a pack with the formula, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rows import Figures, RowError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rloo_pipeline.training.kernels import attention
    from rloo_pipeline.training.layout import Layout

PROMPTS, PROMPT_LENGTHS = (0, 0, 52, 202), (12, 12, 30, 3)
COMPLETIONS, COMPLETION_LENGTHS = (12, 20, 82, 205), (8, 32, 120, 28)
"""Starts of prompts and completions in the row of a pack, and their lengths. Two samples share the first prompt; three
sequences are longer than the windows.
"""
TOKENS = 233
WINDOWS = (None, 7, 32)
HEADS = (4, 2)
"""Query heads and key-value heads."""
MARGIN = 2.0
"""Largest distance of the kernel from float64, as a multiple of the formula's distance in the same number format."""
LEAST = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Distances that are always allowed: a few roundings of numbers near 1."""


class Case(NamedTuple):
    """One comparison."""

    dtype: str
    head_dim: int
    window: int | None


def cases(device: str) -> Iterator[Case]:
    """Formats and head sizes for which a GPU has FlashAttention, or the CPU's counterparts."""
    for dtype in ("bfloat16", "float16", "float32") if device == "cuda" else ("float32",):
        for head_dim in (32, 64, 128, 256) if device == "cuda" else (32,):
            for window in WINDOWS:
                yield Case(dtype, head_dim, window)


def compare(_: Path, device: str) -> Figures:
    """Outputs and gradients of each case, against float64.

    Args:
        device: cuda or cpu.

    Raises:
        RowError: a kernel is farther from float64 than `MARGIN` times the formula in the same format.
    """
    farthest, count, flash = 0.0, 0, 0
    for case in cases(device):
        ours, plain, used = distances(case, device)
        flash += used
        for name, distance in ours.items():
            bound = MARGIN * max(plain[name], LEAST[case.dtype])
            if not distance <= bound:  # NaN is farther, too
                raise RowError(f"{case}: {name} is {distance:.2g} from float64, and the formula is {plain[name]:.2g}")
            farthest, count = max(farthest, distance / bound), count + 1
    if device == "cuda" and not flash:
        raise RowError("FlashAttention was not used in any case")
    return {"comparisons": count, "by FlashAttention": flash, "largest distance by its bound": round(farthest, 3)}


def distances(case: Case, device: str) -> tuple[dict[str, float], dict[str, float], bool]:
    """Largest distances from float64 of the pack's attention and of the formula; True if FlashAttention computed it."""
    import torch

    from rloo_pipeline.training.kernels import attention

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    low = [torch.randn(1, heads, TOKENS, case.head_dim).to(device, dtype) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    upstream = torch.randn(1, TOKENS, HEADS[0], case.head_dim).to(device, dtype)
    exact, mask = [tensor.double() for tensor in low], _mask(case.window)
    scores = attention.Scores(case.head_dim**-0.5, local=getattr(mask, attention.DESCRIPTION, None))
    right = _results(exact, upstream.double(), lambda *heads: _formula(heads, scores))
    plain = _results(low, upstream, lambda *heads: _formula(heads, scores))
    module, layout = torch.nn.Identity(), pack_layout().to(torch.device(device))

    def of_pack(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention.packed_attention(module, query, key, value, mask, layout=layout)[0]

    ours = _results(low, upstream, of_pack)
    flash = attention._supports_flash(low[0], low[2], scores)
    return _apart(ours, right), _apart(plain, right), flash


def _mask(window: int | None) -> Tensor | None:
    import torch

    from rloo_pipeline.training.kernels import attention
    from rloo_pipeline.training.kernels.short_attention import Local

    if window is None:
        return None
    mask = torch.tensor(window)
    setattr(mask, attention.DESCRIPTION, Local(window, chunked=False))
    return mask


def pack_layout() -> Layout:
    """The layout of the pack, on the CPU."""
    import torch

    from rloo_pipeline.training.layout import lay_out

    return lay_out(*map(torch.tensor, (PROMPTS, PROMPT_LENGTHS, COMPLETIONS, COMPLETION_LENGTHS)))


def _formula(heads: Sequence[Tensor], scores: attention.Scores) -> Tensor:
    """softmax(scale · Q·Kᵀ)·V of one sequence at a time; a shared token has the output of its first sequence."""
    import torch

    from rloo_pipeline.training.kernels import attention

    out: dict[int, Tensor] = {}
    for first, prompt, own, completion in zip(PROMPTS, PROMPT_LENGTHS, COMPLETIONS, COMPLETION_LENGTHS, strict=True):
        rows = [*range(first, first + prompt), *range(own, own + completion)]
        query, key, value = (tensor[:, :, rows] for tensor in heads)
        key, value = (tensor.repeat_interleave(HEADS[0] // HEADS[1], 1) for tensor in (key, value))
        for row, output in zip(rows, attention._eager(query, key, value, scores).unbind(2), strict=True):
            out.setdefault(row, output[0])
    return torch.stack([out[row] for row in range(TOKENS)]).unsqueeze(0)


def _results(heads: Sequence[Tensor], upstream: Tensor, attend: Callable[..., Tensor]) -> dict[str, Tensor]:
    """The output and the gradients of queries, keys and values."""
    import torch

    leaves = [tensor.detach().requires_grad_() for tensor in heads]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, upstream)
    return dict(
        zip(("output", "query gradient", "key gradient", "value gradient"), (out.detach(), *gradients), strict=True)
    )


def _apart(actual: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest distances."""
    return {name: float((actual[name].double() - right[name]).abs().max()) for name in right}
