"""The images of the prompts of a run: `prompts/images/`, Arrow rows of digest and image file, each image once.

Sampler, trainer and reward functions get the pixels of `decode`, so all of them see the same image.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.manifest import read_verified, verify_manifest
from rloo_pipeline.errors import UserError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER, ABOUT = "images", "images.json"
IDS, PLACEHOLDERS = "image_ids", "placeholder_ids"
"""Columns of prompts with images: digests, and the prompt's token ids with one placeholder for each image."""
CACHE_SIZE = 256
"""Number of decoded images that an `ImageStore` keeps."""
PIXELS = "\0decoded"
"""Key under which a row in memory has its decoded images, beside the dataset's columns; no column has such a name."""


class About(NamedTuple):
    """Layout of images in the rows of the dataset."""

    column: str
    single: bool
    """True if each row has one image, not a list of images."""
    most: int
    """Maximum number of images in a prompt."""


def write(prompts: Path, files: Mapping[str, bytes], about: About) -> None:
    """Writes image files by their digests, in this order, in an Arrow `Image` column."""
    import datasets

    features = datasets.Features({"digest": datasets.Value("string"), "image": datasets.Image()})
    rows = {"digest": list(files), "image": [{"bytes": file, "path": None} for file in files.values()]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(prompts / FOLDER))
    write_json(prompts / ABOUT, about._asdict())


def about(prompts: Path) -> About | None:
    """Layout of images in the rows; None in a run without images."""
    found = read_verified(prompts, ABOUT)
    return About(**found) if found else None


def digest(file: bytes) -> str:
    """Hex SHA-256 of an image file, the name under which it is stored once."""
    return hashlib.sha256(file).hexdigest()


def decode(file: bytes | Image, location: str) -> Image:
    """The pixels of an image file or a PIL image, in RGB, rotated as its EXIF data say; for an animation, the first
    frame.

    Raises:
        UserError: PIL cannot read it, it has no pixels, more than PIL considers safe, or pixels of over 8 bits, which
            PIL would clip.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(file)) if isinstance(file, bytes) else file)
            if image.mode.startswith(("I", "F")) or not min(image.size):
                raise ValueError(f"mode {image.mode}, {image.width} by {image.height} pixels; convert it to 8-bit RGB")
            return image.convert("RGB")
    except Exception as error:  # any exception: PIL checks few values of EXIF data
        raise UserError(f"{location}: PIL cannot read the image ({one_line(error)})") from error


def read_arrow(shards: Iterable[Path]) -> pa.Table:
    """The rows of files that `datasets` wrote, memory-mapped."""
    return pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(shard))).read_all() for shard in shards)


class ImageStore:
    """Images by digest."""

    def __init__(self, prompts: Path) -> None:
        """Memory-maps the files of the folder that the stage `prompts` wrote.

        Raises:
            UserError: a file is damaged.
        """
        verify_manifest(prompts, lambda name: name.startswith(f"{FOLDER}/"))
        self.folder = prompts / FOLDER
        self.image = lru_cache(CACHE_SIZE)(self._image)
        """Returns the pixels of an image, given its digest."""

    @cached_property
    def _table(self) -> pa.Table:
        return read_arrow(sorted(self.folder.glob("*.arrow")))

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {digest: row for row, digest in enumerate(self._table["digest"].to_pylist())}

    def file(self, digest: str) -> bytes:
        """Returns an image file, given its digest.

        Raises:
            UserError: no image has this digest.
        """
        if digest not in self._rows:
            raise UserError(f"{self.folder}: no image {digest[:16]}, which a table names; rerun the stage `prompts`")
        return bytes(self._table["image"][self._rows[digest]].as_py()["bytes"])

    def _image(self, digest: str) -> Image:
        return decode(self.file(digest), str(self.folder))
