"""Copies heads from a pack's row to the padded layout for attention (`training/layout.py`), and outputs back."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import embedding_bag

from rloo_pipeline.training.layout import HeadIndex


class Gather(torch.autograd.Function):
    """[tokens · heads, head_dim] → [laid out · heads, head_dim]; gradients of all copies of an entry add up."""

    @staticmethod
    def forward(
        ctx: Any, heads: Shaped[Tensor, "row_heads head_dim"], index: HeadIndex
    ) -> Shaped[Tensor, "laid_out_heads head_dim"]:
        """Copies every entry of the row to all its places in the layout."""
        ctx.index = index
        return heads.index_select(0, index.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the row."""
        return embedding_bag(ctx.index.copies, gradients[0], ctx.index.starts, mode="sum"), None


class Scatter(torch.autograd.Function):
    """[laid out · heads, head_dim] → [tokens · heads, head_dim]; only first copies have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, laid_out: Shaped[Tensor, "laid_out_heads head_dim"], index: HeadIndex
    ) -> Shaped[Tensor, "row_heads head_dim"]:
        """Takes every entry of the row from its first copy in the layout."""
        ctx.index = index
        return laid_out.index_select(0, index.first_copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the layout."""
        index = ctx.index
        return gradients[0].index_select(0, index.sources).index_fill_(0, index.other_copies, 0), None
