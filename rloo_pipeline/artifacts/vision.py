"""Models that take images: their image tokens and processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.errors import UserError, one_line, raise_disk_error
from rloo_pipeline.transformers_internals import optional_parts, tokenizer_file

if TYPE_CHECKING:
    from torch import Tensor

UNREAD = "num_crops"
"""Output of Gemma's image processor that the model's forward does not accept; 0, since images are not cropped."""


class ImageKind(NamedTuple):
    """The way in which a type of model takes images. Tokens are given by their keys in config.json."""

    begin: str
    """Token before the parts of an image."""
    end: str
    """Token after the parts of an image."""
    whole: str
    """Placeholder for a whole image in a prompt for vLLM, which expands it."""
    types: str
    """Argument of the model's forward that is 1 at tokens that stand for a part of an image."""
    part: str = "image_token_id"
    """Token that stands for a part of an image."""
    video: str | None = None
    """Token that stands for a part of a video, if the model takes videos too."""


QWEN_VL = ImageKind(
    begin="vision_start_token_id",
    end="vision_end_token_id",
    whole="image_token_id",
    types="mm_token_type_ids",
    video="video_token_id",
)
"""Qwen2.5-VL and Qwen3-VL; `types` gives them the positions (M-RoPE)."""
GEMMA = ImageKind(
    begin="boi_token_id",
    end="eoi_token_id",
    whole="boi_token_id",
    types="token_type_ids",
)
"""Gemma 3; `types` tells it the tokens of an image, which attend to each other in both directions."""
KINDS = {"qwen2_5_vl": QWEN_VL, "qwen3_vl": QWEN_VL, "gemma3": GEMMA}
"""Kinds by `model_type` in config.json; tests/stages/test_images.py runs each of them."""


class ImageTokens(NamedTuple):
    """The tokens that stand for an image in a model's prompts."""

    part: int
    """Id of the tokens that stand for a part of an image."""
    whole: int
    """Id of the placeholder for a whole image in a prompt for vLLM."""
    types: str
    """Argument of the model's forward, as in ImageKind."""

    def marked(self, input_ids: Tensor) -> dict[str, Tensor]:
        """The argument `types` of the model's forward for these ids, of the same shape."""
        return {self.types: (input_ids == self.part).long()}


def takes_images(hf_config: Mapping[str, Any]) -> bool:
    """True if a config.json belongs to a model in KINDS."""
    return hf_config.get("model_type") in KINDS


def kind_of(hf_config: Mapping[str, Any]) -> ImageKind:
    """The kind of images that the model of a config.json takes; it must take some."""
    return KINDS[hf_config["model_type"]]


def tokens_of(hf_config: Mapping[str, Any]) -> ImageTokens:
    """The image tokens of a model in KINDS, from its config.json."""
    kind = kind_of(hf_config)
    return ImageTokens(_id(hf_config, kind.part), _id(hf_config, kind.whole), kind.types)


def placeholder_ids(hf_config: Mapping[str, Any]) -> list[int]:
    """Ids that stand for a part of an image or video; no model samples them, since no image belongs to them."""
    if not takes_images(hf_config):
        return []
    kind = kind_of(hf_config)
    return [_id(hf_config, name) for name in (kind.part, kind.video) if name is not None]


def _id(hf_config: Mapping[str, Any], key: str) -> int:
    """A token id; some config.json files have `image_token_index` for `image_token_id`."""
    return int(hf_config[key if key in hf_config else key.replace("_id", "_index")])


def load_processor(folder: Path, hf_config: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """Loads the processor of a full model, which prepares text and images as vLLM's does.

    Raises:
        UserError: the folder has none, or one that does not belong to the model.
    """
    optional_parts.prepare_processors()
    tokenizer_file.prepare_tokenizers()
    from transformers import AutoProcessor

    try:
        processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise_disk_error(error, folder)
        raise UserError(
            f"{folder}: the image processor cannot be loaded ({one_line(error)}); add the preprocessor_config.json "
            "that belongs to the model"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UserError(f"{folder}: has no preprocessor_config.json for images; add the one that belongs to the model")
    if KINDS.get(str(hf_config.get("model_type"))) is GEMMA and (problem := _gemma_problem(hf_config, processor)):
        raise UserError(f"{folder}: {problem}")
    return processor


def _gemma_problem(hf_config: Mapping[str, Any], processor: Any) -> str | None:
    """The problem with Gemma's processor or sizes, and advice; None if there is none."""
    images, parts = processor.image_processor, hf_config.get("mm_tokens_per_image", 256)
    if images.do_pan_and_scan:
        return (
            "do_pan_and_scan is true in preprocessor_config.json, but prompts with crops of images are not supported; "
            "set it to false"
        )
    side = hf_config["vision_config"].get("image_size", 224)
    if (images.size["height"], images.size["width"]) != (side, side):
        return (
            f"preprocessor_config.json makes images of {images.size['height']} by {images.size['width']} pixels, but "
            f"the vision encoder takes {side} by {side}; use the file that belongs to the model"
        )
    if processor.image_seq_length != parts:
        return (
            f"the processor turns an image into {processor.image_seq_length} tokens, but mm_tokens_per_image in "
            f"config.json is {parts}; set image_seq_length: {parts} in processor_config.json"
        )
    window = hf_config["text_config"].get("sliding_window") or parts
    if parts > window:
        return (
            f"an image has {parts} tokens (mm_tokens_per_image), more than the attention window ({window}), and vLLM "
            "attends within such an image in one direction only; use another model"
        )
    return None
