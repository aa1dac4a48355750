"""Inputs of stage-assets: local files, and repositories of the Hub, pinned by their commits.

Its rule watches the local files, but of a model only config.json: Snakemake would run all again where a large file is
merely newer. Where another file of a model is, `replaced` says so, and where another file has an older time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.assets import ASSETS
from rloo_pipeline.before_run import dataset_inputs
from rloo_pipeline.config import Config

COMMIT = re.compile(r"[0-9a-f]{40}")


def local_files(config: Config) -> list[Path]:
    """Local files of the datasets, and the model's config.json: when one of them changes, everything made from it runs
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
    """Files that `datasets.load_dataset` may read in a folder: none that are hidden, or in a hidden folder."""
    files = sorted(folder.rglob("*"))
    return [file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)]


def replaced(folder: Path) -> str | None:
    """A sentence if a local file was replaced since `folder` was written, the assets of a run, and nothing will run
    again for it. For a newer data file everything runs again.
    """
    try:
        written = (folder / ASSETS).stat().st_mtime
        sources = _local_sources(folder)
    except (OSError, ValueError, KeyError):  # what reads them says it
        return None
    if file := next(_replaced(sources, written), None):
        return (
            f"{file} was replaced after the run began, and nothing would run again for it: delete {folder} to begin "
            "again with the new one, give the run another name, or put the old one back with its old time"
        )
    return None


def _replaced(sources: dict[str, Any], written: float) -> Iterator[Path]:
    """Files that are not those of the entries. Another one may have an older time, by `mv`, `cp -p` or `rsync -a`, and
    the same size: only then are contents compared, of at most a GiB in all.
    """
    moved = []
    for name, source in sources.items():
        top, is_model = Path(source["path"]), name in ("model", "reward_model") or name.startswith("teacher")
        for inner, entry in source["files"].items():
            file = (top.parent if top.is_file() else top) / inner
            if not file.exists():
                continue
            status = file.stat()
            if status.st_mtime > written:
                yield from [file] if is_model else []
            elif status.st_size != entry["bytes"]:
                yield file
            elif status.st_ctime > written:
                moved.append((status.st_size, file, entry[manifest.DIGEST]))
    sizes = accumulate(size for size, *_ in sorted(moved))
    with suppress(ImportError):  # a controller without blake3
        for total, (_, file, digest) in zip(sizes, sorted(moved), strict=True):
            if total <= manifest.LARGE and manifest.digest(file) != digest:
                yield file


def lost(config: Config, folder: Path) -> str | None:
    """A sentence if a model or dataset that was a local folder when `folder` was written, the assets of a run, is not
    there. Snakemake would take it for one of the Hub, and make everything again.
    """
    try:
        recorded = {source["path"] for source in _local_sources(folder).values()}
    except (OSError, ValueError, KeyError):
        return None
    models = (Path(model.name_or_path) for model in config.model_sources if model.name_or_path)
    data = (
        Path(config.data_dir or ".") / name
        for source in dataset_inputs.sources(config).values()
        if (name := source.name)
    )
    for path in (*models, *data):
        if str(path) in recorded and not path.exists():
            return f"{path} is missing, and the run began with this folder; put it back, or give the run another name"
    return None


def _local_sources(folder: Path) -> dict[str, Any]:
    """The entries of assets.json about files that are neither the run's own nor from the Hub."""
    assets = json.loads((folder / ASSETS).read_text(encoding="utf-8"))
    entries = {name: entry for name, entry in assets.items() if isinstance(entry, dict)}
    return {name: entry for name, entry in entries.items() if entry["revision"] is None and entry["files"]}


def are_pinned(config: Config) -> bool:
    """True if the run gets the same from the Hub at any time: it names the commit of all that it fetches there."""
    return all(COMMIT.fullmatch(revision or "") for revision in _revisions(config))


def _revisions(config: Config) -> Iterator[str | None]:
    """Revisions of all that is fetched from the Hub, as configured."""
    for source in dataset_inputs.sources(config).values():
        if source.name and not (Path(config.data_dir or ".") / source.name).is_dir():
            yield source.revision
    for model in config.model_sources:
        if model.name_or_path and not Path(model.name_or_path).is_dir():
            yield model.revision
