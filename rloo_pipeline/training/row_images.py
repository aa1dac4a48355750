"""The images of the sequences in a batch, as arguments of the model's forward.

The model's image processor gets each image alone, so its output depends on nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from rloo_pipeline.artifacts import image_store
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.vision import ImageTokens
from rloo_pipeline.errors import UserError

CACHE_SIZE = 16
"""Number of processed images to keep: completions of one prompt follow each other."""


class Vision(NamedTuple):
    """The images of a batch, in the order of its sequences."""

    arguments: dict[str, Tensor]
    """Arguments of the model's forward, such as pixel_values; images follow each other in the first dimension."""
    tokens: ImageTokens
    """The tokens that stand for an image."""

    def inputs(self, input_ids: Int[Tensor, "sequences tokens"]) -> dict[str, Tensor]:
        """All arguments that a batch with these ids needs for its images."""
        return {**self.arguments, **self.tokens.marked(input_ids)}


class RowImages(NamedTuple):
    """The images of sequences, by row."""

    rows: Sequence[Sequence[Any]]
    """The images of each sequence, such as their digests."""
    pixels: Callable[[Any], Mapping[str, Tensor]]
    """Function that processes an image."""
    tokens: ImageTokens

    def pick(self, rows: Sequence[int]) -> Vision | None:
        """The images of these sequences; None if they have none."""
        images = [self.pixels(image) for row in rows for image in self.rows[row]]
        if not images:
            return None
        return Vision({name: torch.cat([image[name] for image in images]) for name in images[0]}, self.tokens)


def of_rollouts(rollouts: pa.Table, prompts: Path | None, policy: Policy) -> RowImages | None:
    """The images of a table of rollouts; None if its prompts have none.

    Args:
        rollouts: the table.
        prompts: folder that the stage `prompts` wrote.
        policy: the policy, for its processor.

    Raises:
        UserError: the prompts have images, but `prompts` is None.
    """
    if image_store.IDS not in rollouts.column_names:
        return None
    if prompts is None:
        raise UserError("the prompts of these rollouts have images; name the folder of the prompts with --prompts")
    store = image_store.ImageStore(prompts)
    pixels = lru_cache(CACHE_SIZE)(lambda digest: policy.pixels(store.image(digest)))
    return RowImages(rollouts[image_store.IDS].to_pylist(), pixels, policy.image_tokens)
