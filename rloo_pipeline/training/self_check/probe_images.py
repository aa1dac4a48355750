"""Images of random pixels in the prompts of the probe, for models of images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo_pipeline.training import row_images
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.self_check.small import PLACEHOLDERS

SHARED, OTHER = [(2, 3)], [(3, 1), (2, 2)]
"""Height and width in tokens of the images of the shared prompt, which have other pixels in each sequence, and of the
other prompt.
"""


class DrawnImages(NamedTuple):
    """The images of a few sequences."""

    rows: list[list[dict[str, Tensor]]]
    token: int

    def pick(self, rows: Sequence[int]) -> row_images.Vision | None:
        """The images of these sequences; None if they have none."""
        return row_images.joined([*chain.from_iterable(self.rows[row] for row in rows)], self.token)


def show(sequences: Sequences, config: Any) -> Sequences:
    """The sequences of the probe with images in their prompts, behind the first token.

    Args:
        sequences: of `probe`: three with one prompt, and one with another.
        config: transformers configuration of the small model.
    """
    draw = torch.Generator().manual_seed(2)
    sizes = [SHARED, SHARED, SHARED, OTHER]
    images = [[_image(config, *size, draw) for size in of_row] for of_row in sizes]
    shown = [[token for height, width in of_row for token in _tokens(config, height * width)] for of_row in sizes]
    last = config.get_text_config().vocab_size - len(PLACEHOLDERS)

    def text(tokens: Sequence[int]) -> list[int]:
        return [token % last for token in tokens]

    prompts = [text(prompt) for prompt in sequences.prompts]
    return Sequences(
        [[*prompt[:1], *tokens, *prompt[1:]] for prompt, tokens in zip(prompts, shown, strict=True)],
        [text(completion) for completion in sequences.completions],
        images=DrawnImages(images, config.image_token_id),
    )


def _tokens(config: Any, count: int) -> list[int]:
    return [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]


def _image(config: Any, height: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """An image of Qwen-VL: patches [patches, values of a patch] and their grid; `height` and `width` in tokens."""
    part = config.vision_config
    merge = part.spatial_merge_size
    grid = [1, height * merge, width * merge]
    values = part.in_channels * part.temporal_patch_size * part.patch_size**2
    pixels = torch.randn(grid[1] * grid[2], values, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
