"""assets.json: the locations of the model and the datasets of a run, written by the stage `stage-assets`.

It holds digests of files that lie elsewhere, such as the user's own model, for readers to check.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.files import read_artifact, write_json
from rloo_pipeline.artifacts.manifest import check_entries, entries, file_names, verify_manifest, write_manifest
from rloo_pipeline.artifacts.model_files import PICKLES, tensors_in
from rloo_pipeline.errors import UserError

ASSETS = lineage.ASSETS
PIECE = 1024
"""Bytes of each tensor that `identity` reads."""
READ_IN_MODEL = re.compile(
    r"(?!trainer_state\.json$|[^/]*_results\.json$)[^/]+\.(json|jinja|py|model|tiktoken|safetensors)"
    r"|vocab\.txt|merges\.txt|additional_chat_templates/[^/]+\.jinja"
)
"""Matches files of a model's folder that transformers or vLLM read if they find them there."""


def write(
    folder: Path, places: Mapping[str, Mapping[str, str | None]], output: Path | None = None, **about: object
) -> None:
    """Writes each source's path, revision and digests, and the manifest of the folder, which may hold a built model.

    Args:
        folder: folder to write to.
        places: path and revision of each source.
        output: final path of the folder, if it will be moved.
        about: facts about the run, for `lineage`.
    """
    described = {}
    for key, place in places.items():
        path = Path(str(place["path"]))
        top, names = (path, []) if path.is_relative_to(output or folder) else files_of_source(path)
        described[key] = {**place, "files": entries(top, names)}
    write_json(folder / ASSETS, described)
    write_manifest(folder, **about)
    make_newest(folder, described)


def make_newest(folder: Path, places: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes assets.json at least as new as the files of its sources: the clock of their server may be ahead."""
    sources = [(Path(place["path"]), place["files"]) for place in places.values()]
    files = [(path.parent if path.is_file() else path) / name for path, names in sources for name in names]
    newest = max([file.stat().st_mtime_ns for file in files if file.exists()], default=0)
    if newest > (folder / ASSETS).stat().st_mtime_ns:
        os.utime(folder / ASSETS, ns=(newest, newest))


def read(folder: Path, *keys: str, weights: bool = True) -> dict[str, Any]:
    """Reads the path and revision of each source.

    Args:
        folder: the assets folder.
        keys: sources that the caller reads; their files are checked.
        weights: True if the caller reads weights.

    Raises:
        UserError: a file of the folder or of one of these sources is missing or damaged.
    """
    verify_manifest(folder)
    places = read_artifact(folder / ASSETS)
    for key in keys:
        if key not in places:
            raise UserError(f"{folder / ASSETS}: has no {key}; delete {folder} and run again")
        recorded = {name: entry for name, entry in places[key]["files"].items() if weights or not is_weights(name)}
        if recorded:
            top, names = files_of_source(Path(places[key]["path"]))
            remedy = f"put it back as it was, or delete {folder} and run again"
            names = [name for name in names if weights or not is_weights(name)]
            if is_model(key):  # others that are new, such as a licence or a trainer's checkpoint, are not read
                names = [name for name in names if name in recorded or READ_IN_MODEL.fullmatch(name)]
            check_entries(top, recorded, names, remedy, "is new since the run began")
    return places


def model_of(folder: Path, key: str = "model") -> Path:
    """The folder of the model that the run starts from, or of its `teacher`.

    Raises:
        UserError: see `read`.
    """
    return Path(read(folder, key)[key]["path"])


def policy_of(folder: Path) -> Path:
    """The folder of a policy: `folder` itself, or the base model in a folder of assets."""
    return model_of(folder) if (folder / ASSETS).exists() else folder


def is_model(key: str) -> bool:
    """True for sources that are models; others are datasets."""
    return key in ("model", "reward_model") or key.startswith("teacher")


def is_weights(name: str) -> bool:
    """True for a file of weights, which policy 0 holds a copy of."""
    return name.endswith(".safetensors")


def files_of_source(path: Path) -> tuple[Path, list[str]]:
    """The folder of a source, and the names of its files that a run may read; none for a generator."""
    if path.is_file():
        return path.parent, [path.name]
    names = [name for name in file_names(path) if "/." not in f"/{name}"]  # without hidden folders
    return path, [name for name in names if not name.endswith((*PICKLES, ".md"))]


def identity(folder: Path) -> str:
    """SHA-256 (hex) of a model's files. Of weights only the shapes and the first bytes of each tensor count: training
    changes all numbers of a tensor, and reading a large model takes minutes.
    """
    found = hashlib.sha256()
    for name in sorted(filter(READ_IN_MODEL.fullmatch, files_of_source(folder)[1])):
        found.update(f"{name}\0".encode())
        with (folder / name).open("rb") as file:
            if not is_weights(name):
                found.update(hashlib.file_digest(file, "sha256").digest())
                continue
            tensors = tensors_in(folder / name)
            found.update(json.dumps(tensors, sort_keys=True).encode())
            places = sorted(entry["data_offsets"] for entry in tensors.values())
            first = os.fstat(file.fileno()).st_size - max((end for _, end in places), default=0)
            for begin, end in places:
                file.seek(first + begin)
                found.update(file.read(min(PIECE, end - begin)))
    return found.hexdigest()
