"""FlashAttention 3 (arXiv 2407.08608) instead of torch's FlashAttention 2, on Hopper if its package is installed.

torch dispatches to it (`torch.nn.attention.activate_flash_attention_impl`), so attention is called as before. It is
tried once per process on two small cases. Unless it is as close to float32 as torch's kernels, those are restored.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from rloo_pipeline.errors import one_line
from rloo_pipeline.training.kernels.short_attention import Local, mask_of

PACKAGE = "flash_attn_interface"
LENGTHS = (40, 129)
"""Lengths of the sequences in a test case."""
SLACK = 1.5
"""Largest error allowed, as a multiple of the error of torch's own kernels."""

_seen = set[str]()
"""Devices for which `install` has been called."""


def install(device: str) -> str:
    """Activates FlashAttention 3 on the device of a model if its results are right; tries once per process.

    Returns:
        The reason it stays off, on the first call; empty if it is on, not installed, or not for this card.
    """
    if device in _seen or not is_for(device):
        return ""
    _seen.add(device)
    usual = [error(window, device) for window in (0, 32)]
    try:
        activate_flash_attention_impl("FA3")
        errors = [error(window, device) for window in (0, 32)]
    except Exception as failure:  # any exception: a library's kernel may fail on this card
        restore_flash_attention_impl(_raise_warn=False)
        return one_line(failure)
    if all(new <= SLACK * old for new, old in zip(errors, usual, strict=True)):
        return ""
    restore_flash_attention_impl(_raise_warn=False)
    return f"its results differ from float32 by {max(errors):.2g}, those of FlashAttention 2 by {max(usual):.2g}"


def is_for(device: str) -> bool:
    """True if the package is installed and the device is a Hopper."""
    installed = importlib.util.find_spec(PACKAGE) is not None
    return installed and device.startswith("cuda") and torch.cuda.get_device_capability(device)[0] == 9


def error(window: int, device: str) -> float:
    """The largest difference of outputs and gradients in bfloat16 from those in float32, for the same inputs."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(sum(LENGTHS), heads, 64, generator=generator) for heads in (4, 2, 2, 4)]
    *heads, weights = (tensor.to(device, torch.bfloat16) for tensor in drawn)
    results = []
    for way, dtype in ((by_torch, torch.bfloat16), (_exact, torch.float32)):
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in heads]
        out = way(inputs, window)
        (out * weights.to(dtype)).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in inputs)])
    return max(float((a.float() - b).abs().max()) for a, b in zip(*results, strict=True) if a is not None)


def _exact(heads: list[Tensor], window: int) -> Tensor:
    """Attention by its formula, one sequence at a time; a window of 0 is none."""
    outputs = []
    for query, key, value in zip(*(tensor.split(LENGTHS) for tensor in heads), strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
        mask = mask_of(q.shape[1], Local(window, chunked=False) if window else None, q.device)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def by_torch(heads: list[Tensor], window: int) -> Tensor:
    """Attention by torch's dispatcher."""
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=heads[0].device)
    return flash_attention(heads, starts, max(LENGTHS), heads[0].shape[-1] ** -0.5, window)


def flash_attention(heads: Sequence[Tensor], starts: Tensor, longest: int, scale: float, window: int) -> Tensor:
    """torch's FlashAttention of packed sequences; a window of 0 attends to all earlier tokens.

    Args:
        heads: queries, keys and values, [tokens, heads, head_dim].
        starts: [sequences + 1] start of each sequence, and the end.
        longest: length of the longest sequence.
        scale: factor of the scores.
        window: tokens that a token attends to, including itself.
    """
    from torch.nn.attention import varlen

    (query, key, value), earlier = heads, window - 1 if window else -1
    out: Any = varlen.varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=(earlier, 0), enable_gqa=True
    )
    return out  # type: ignore[no-any-return]
