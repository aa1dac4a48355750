"""Images in the rows of a dataset: their files, and their positions in the messages of a prompt."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts.image_store import decode
from rloo_pipeline.config import Dataset
from rloo_pipeline.data.prompting import check_embedded, guard, render
from rloo_pipeline.errors import UserError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS = ("image", "images")
"""Columns with images in TRL's datasets."""
VALID = "an image is a datasets.Image with bytes or a local path, or a PIL image from a generator"


def is_image(value: Any) -> bool:
    """True if a value is an image as `datasets` stores it or as PIL holds it."""
    if isinstance(value, Mapping):
        return {*value} == {"bytes", "path"}
    return hasattr(value, "tobytes") and hasattr(value, "convert")


def images_of(value: Any, location: str) -> list[tuple[bytes, Image]]:
    """The image files of a row with their pixels: of one image or a list of images; none for null.

    Args:
        value: value of the column.
        location: file, row and column, for messages.

    Raises:
        UserError: the value is something else, or an image cannot be read.
    """
    given = [] if value is None else value if isinstance(value, list) else [value]
    files = [_bytes_of(image, location) for image in given]
    return [(file, decode(file, location)) for file in files]


def _bytes_of(image: Any, location: str) -> bytes:
    if not is_image(image):
        raise UserError(f"{location} holds {image!r:.60}; {VALID}")
    if not isinstance(image, Mapping):
        buffer = io.BytesIO()
        decode(image, location).save(buffer, "PNG")  # Pillow would not store the rotation in its EXIF
        return buffer.getvalue()
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    try:
        return Path(str(image["path"])).read_bytes()
    except OSError as error:
        raise UserError(f"{location}: the image {image['path']} cannot be read ({error.strerror}); {VALID}") from error


def with_parts(prompt: Any, count: int, location: str) -> list[dict[str, Any]]:
    """The messages of a prompt with `count` images as content parts, as in TRL.

    If no message has image parts yet, all images go to the beginning of the first user message.

    Raises:
        UserError: the prompt is not a list of messages, their contents are neither strings nor parts, it has no user
            message, or it has a different number of image parts.
    """
    if isinstance(prompt, str):
        raise UserError(
            f"{location}: a prompt with images must be messages; set dataset.user_prompt, or name a column of messages "
            "in dataset.prompt_column"
        )
    messages = [{**message, "content": _parts(message.get("content"), location)} for message in prompt]
    placed = sum(part["type"] == "image" for message in messages for part in message["content"])
    if not placed and count:
        user = next((message for message in messages if message["role"] == "user"), None)
        if user is None:
            raise UserError(f"{location}: a prompt with images needs a user message; add one")
        user["content"] = [*({"type": "image"} for _ in range(count)), *user["content"]]
    elif placed != count:
        raise UserError(f"{location}: the messages have places for {placed} images but the row has {count}; correct it")
    return messages


def _parts(content: Any, location: str) -> list[dict[str, Any]]:
    """Content as a list of parts, without the keys that are None because a row of a table lacks them."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") for part in parts):
        raise UserError(
            f"{location}: a message has the content {content!r:.60}; it must be a string, or parts with a type such as "
            "{type: image}"
        )
    return [{key: value for key, value in part.items() if value is not None} for part in parts]


def check_named(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Checks that rows for a model that takes images have none if the configuration names no image column.

    Raises:
        UserError: a column of COLUMNS has images.
    """
    for name in COLUMNS:
        values = (row.get(name) for row in rows)
        if any(is_image(value[0] if isinstance(value, list) and value else value) for value in values):
            raise UserError(
                f"{path}: column '{name}' has images that no prompt would show; set dataset.image_column: {name}, or "
                "drop the column"
            )


class ImagePrompt(NamedTuple):
    """Token ids of a prompt with images."""

    prompt_ids: list[int]
    """Ids as the model reads them: one placeholder for each part of an image."""
    placeholder_ids: list[int]
    """Ids as vLLM takes them: one placeholder for each image."""


def encode(prompt: Any, pixels: Sequence[Image], dataset: Dataset, processor: Any, location: str) -> ImagePrompt:
    """Token ids of a prompt with images, up to the start of the completion.

    Raises:
        UserError: the messages cannot hold the images, the chat template shows a different number of them, or a text
            spells a special token, such as an image placeholder.
    """
    messages = with_parts(prompt, len(pixels), location)
    spelled = None if dataset.split_special_tokens is False else guard(dataset, processor.tokenizer).spelled(messages)
    if spelled is not None:  # the processor takes text, not ids, so a spelling would become the token
        raise UserError(
            f"{location}: a text spells the special token {spelled!r}; remove it, or set dataset.split_special_tokens: "
            "false if it is meant"
        )
    text = render(messages, dataset, processor.tokenizer, location)
    ids = list(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    shown = ids.count(processor.image_token_id)
    if shown != len(pixels):
        raise UserError(
            f"{location}: the chat template shows {shown} images but the row has {len(pixels)}; use the template that "
            f"belongs to the model, and remove '{processor.image_token}' from the text"
        )
    if stray := ({*processor.image_token_ids} - {processor.image_token_id}) & {*ids}:
        tokens = ", ".join(processor.tokenizer.convert_ids_to_tokens(sorted(stray)))
        raise UserError(f"{location}: a text has {tokens}, which stands for a part of an image; remove it")
    check_embedded(ids, processor.tokenizer, location)
    if not pixels:
        return ImagePrompt(ids, ids)
    try:
        expanded = processor(images=list(pixels), text=[text], add_special_tokens=False)["input_ids"][0]
    except ValueError as error:  # for example because an image is too narrow for the model
        raise UserError(
            f"{location}: the model's processor refuses an image ({one_line(error)}); drop the row"
        ) from error
    return ImagePrompt(list(expanded), ids)
