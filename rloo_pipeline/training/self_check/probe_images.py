"""Images of random pixels in the prompts of the probe, for models of images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo_pipeline.artifacts import vision
from rloo_pipeline.training import row_images
from rloo_pipeline.training.packing import Sequences

SHARED, OTHER = [(2, 3)], [(3, 1), (2, 2)]
"""Height and width in tokens of the images of the shared prompt, which have other pixels in each sequence, and of the
other prompt; where all images of a model have the same size, there are as many of that size.
"""


class DrawnImages(NamedTuple):
    """The images of a few sequences."""

    rows: list[list[dict[str, Tensor]]]
    tokens: vision.ImageTokens

    def pick(self, rows: Sequence[int]) -> row_images.Vision | None:
        """The images of these sequences; None if they have none."""
        return row_images.joined([*chain.from_iterable(self.rows[row] for row in rows)], self.tokens)


def show(sequences: Sequences, config: Any) -> Sequences:
    """The sequences of the probe with images in their prompts, behind the first token.

    Args:
        sequences: sequences of `probe`: three with one prompt, and one with another.
        config: transformers configuration of the small model.
    """
    draw = torch.Generator().manual_seed(2)
    sizes = [SHARED, SHARED, SHARED, OTHER]
    images = [[_image(config, *size, draw) for size in of_row] for of_row in sizes]
    shown = [[token for size in of_row for token in _tokens(config, _count(config, *size))] for of_row in sizes]
    prompts = zip(sequences.prompts, shown, strict=True)
    return Sequences(
        [[*prompt[:1], *tokens, *prompt[1:]] for prompt, tokens in prompts],
        sequences.completions,
        images=DrawnImages(images, vision.tokens_of(config.to_dict())),
    )


def _tokens(config: Any, count: int) -> list[int]:
    """The tokens of an image with `count` parts."""
    kind = vision.kind_of(config.to_dict())
    return [getattr(config, kind.begin), *[getattr(config, kind.part)] * count, getattr(config, kind.end)]


def _count(config: Any, height: int, width: int) -> int:
    """Number of tokens that stand for parts of an image."""
    return int(getattr(config, "mm_tokens_per_image", height * width))


def _image(config: Any, height: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """An image of Qwen-VL: patches [patches, values of a patch] and their grid; `height` and `width` in tokens. Or one
    of Gemma: pixels [1, channels, height, width], all of one size.
    """
    part = config.vision_config
    if hasattr(config, "mm_tokens_per_image"):
        return {"pixel_values": torch.randn(1, part.num_channels, part.image_size, part.image_size, generator=draw)}
    merge = part.spatial_merge_size
    grid = [1, height * merge, width * merge]
    values = part.in_channels * part.temporal_patch_size * part.patch_size**2
    pixels = torch.randn(grid[1] * grid[2], values, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
