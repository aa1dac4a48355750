"""Finds the inputs of stage-assets: local files, and Hub repositories pinned by commit.

Its rule watches local files, but only config.json of a model, since Snakemake would rerun everything if a large file
were merely newer. If another file of a model was replaced, `replaced` reports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.artifacts.assets import ASSETS
from rloo_pipeline.before_run import dataset_inputs
from rloo_pipeline.config import Config

COMMIT = re.compile(r"[0-9a-f]{40}")


def local_files(config: Config) -> list[Path]:
    """Local files of the datasets, and the model's config.json. When one of them changes, everything made from it runs
    again.
    """
    files = []
    for source in dataset_inputs.sources(config).values():
        if source.path:
            files.append(Path(config.data_dir or ".") / source.path)
        elif source.name:
            files += _files_in(Path(config.data_dir or ".") / source.name)
    files += [Path(model.name_or_path) / "config.json" for model in config.model_sources if model.name_or_path]
    return [file for file in files if file.is_file()]


def _files_in(folder: Path) -> list[Path]:
    """Files in a folder that `datasets.load_dataset` may read: all that are neither hidden nor in a hidden folder."""
    files = sorted(folder.rglob("*"))
    return [file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)]


def replaced(folder: Path) -> str | None:
    """The error message if a file of a local model was replaced since `folder`, the assets of a run, was written."""
    try:
        written = (folder / ASSETS).stat().st_mtime
        assets = json.loads((folder / ASSETS).read_text(encoding="utf-8"))
        models = [
            place for name, place in assets.items() if name in ("model", "reward_model") or name.startswith("teacher")
        ]
    except (OSError, ValueError, KeyError):  # the code that reads them will complain
        return None
    local = [model for model in models if model["revision"] is None]
    entries = ((Path(model["path"]) / name, entry) for model in local for name, entry in model["files"].items())
    for file, entry in entries:
        if file.exists() and (file.stat().st_mtime > written or file.stat().st_size != entry["bytes"]):
            return (
                f"{file} was replaced after the run began, and nothing would run again for it: delete {folder} to "
                "begin again with the new one, give the run another name, or put the old one back with its old time"
            )
    return None


def are_pinned(config: Config) -> bool:
    """True if the run fetches the same from the Hub at any time, because it names the commit of everything that it
    fetches.
    """
    return all(COMMIT.fullmatch(revision or "") for revision in _revisions(config))


def _revisions(config: Config) -> Iterator[str | None]:
    """Configured revisions of everything that is fetched from the Hub."""
    for source in dataset_inputs.sources(config).values():
        if source.name and not (Path(config.data_dir or ".") / source.name).is_dir():
            yield source.revision
    for model in config.model_sources:
        if model.name_or_path and not Path(model.name_or_path).is_dir():
            yield model.revision
