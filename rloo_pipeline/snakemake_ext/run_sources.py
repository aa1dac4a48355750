"""Finds the inputs of stage-assets: local files, and Hub repositories pinned by commit.

Its rule watches local files, but only config.json of a model, since Snakemake would rerun everything if a large file
were merely newer. `replaced` reports other files of a model that were replaced, and files replaced by older ones. A
data file that is newer but has the same content reruns nothing either (`unchanged`).
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.assets import ASSETS, READ_IN_MODEL, files_of_source, is_model, is_weights
from rloo_pipeline.config import Config, ModelSource, Source

COMMIT = re.compile(r"[0-9a-f]{40}")


def local_files(config: Config) -> list[Path]:
    """Local files of the datasets, and the model's config.json. When one of them changes, everything made from it runs
    again.
    """
    files = [Path(config.data_dir or ".") / source.path for source in config.row_sources.values() if source.path]
    for source, folder in _by_name(config):
        files += _files_in(folder) if isinstance(source, Source) else [folder / "config.json"]
    return [file for file in files if file.is_file()]


def _by_name(config: Config) -> Iterator[tuple[ModelSource | Source, Path]]:
    """Yields models and datasets that are folders or on the Hub, each with the folder."""
    for model in config.model_sources:
        if model.name_or_path:
            yield model, Path(model.name_or_path)
    for source in config.row_sources.values():
        if source.name:
            yield source, Path(config.data_dir or ".") / source.name


def _files_in(folder: Path) -> list[Path]:
    """Files in a folder that `datasets.load_dataset` may read: all that are neither hidden nor in a hidden folder."""
    files = sorted(folder.rglob("*"))
    return [file for file in files if not any(part[0] == "." for part in file.relative_to(folder).parts)]


def replaced(folder: Path) -> str | None:
    """The error message if a local file was replaced after `folder`, the assets of a run, was written, but nothing
    would run again for it. (A newer data file with other content makes everything run again.)

    A replacement can have an older time (by `mv`, `cp -p` or `rsync -a`) and the same size. So can all files of a
    folder that was renamed, or to which a link now points.
    """
    moved = []
    if listed := _other_files(folder):
        return listed
    for source in _sources(folder):
        if source.is_newer:
            if source.is_model:
                return _replaced(source.file, folder)
        elif source.status.st_size != source.bytes:
            return _replaced(source.file, folder)
        elif source.moved > source.changed:
            moved.append(source)
    other = next((source.file for source, same in _compared(moved) if not same), None)
    return _replaced(other, folder) if other else None


def _other_files(folder: Path) -> str | None:
    """The error message if a file that libraries read, such as a chat template, was added to a local model or removed
    from it after `folder`, the assets of a run, was written. Weights do not count: a finished run does without them.
    """
    with suppress(OSError, ValueError, KeyError):
        models = (source for name, source in recorded(folder).items() if is_model(name))
        for source in (source for source in models if Path(source["path"]).is_dir()):
            top, names = files_of_source(Path(source["path"]))
            for other in sorted({*names} ^ source["files"].keys()):
                if READ_IN_MODEL.fullmatch(other) and not is_weights(other):
                    done = "added to" if other in names else "removed from"
                    return (
                        f"{other} was {done} {top} after the run began, and nothing would run again for it: undo this, "
                        f"add --forcerun {folder} to begin again, or give the run another name"
                    )
    return None


def _replaced(file: Path, folder: Path) -> str:
    return (
        f"{file} was replaced after the run began, and nothing would run again for it: add --forcerun {folder} to "
        "begin again with the new one, give the run another name, or put the old one back with its old time"
    )


def unchanged(folder: Path) -> set[Path]:
    """Data files that are newer than `folder`, the assets of a run, but have the same content, for example after `git
    checkout`.
    """
    newer = [source for source in _sources(folder) if source.is_newer and not source.is_model]
    return {source.file for source, same in _compared(newer) if same}


class _Source(NamedTuple):
    """A local file that a run began with and that still exists."""

    file: Path
    status: os.stat_result
    moved: float
    """Time at which the file, or the folder or link that the configuration names, was last changed or renamed."""
    is_model: bool
    bytes: int
    digest: str
    written: float
    """The time of the assets, at least that of the newest source."""
    changed: float
    """Time at which the assets were written."""

    @property
    def is_newer(self) -> bool:
        return self.status.st_mtime > self.written


def _sources(folder: Path) -> Iterator[_Source]:
    """Yields the local files named in `folder`, the assets of a run; none if the assets cannot be read."""
    with suppress(OSError, ValueError, KeyError):
        assets = (folder / ASSETS).stat()
        times = assets.st_mtime, min(assets.st_mtime, assets.st_ctime)  # a copy of the run has a later ctime
        for name, source in recorded(folder).items():
            named = Path(source["path"])
            top = named.parent if named.is_file() else named
            for inner, entry in source["files"].items():
                with suppress(FileNotFoundError):
                    status = (top / inner).stat()
                    of_file = max(status.st_ctime, placed(named)), is_model(name), entry["bytes"]
                    yield _Source(top / inner, status, *of_file, entry[manifest.DIGEST], *times)


def placed(named: Path) -> float:
    """Time before which the folder or link that the configuration names was put in its place.

    A rename, or another link, changes both its time and that of its parent; a chmod or a new file in it, only its own.
    """
    parent = named if named.name in ("", "..") else named.parent
    return min(named.lstat().st_ctime, parent.stat().st_ctime)


def _compared(sources: list[_Source]) -> Iterator[tuple[_Source, bool]]:
    """Yields files of at most a GiB in total, smallest first, each with True if its content is unchanged."""
    with suppress(ImportError):  # a controller without blake3
        total = 0
        for source in sorted(sources, key=lambda source: source.bytes):
            if (total := total + source.bytes) > manifest.LARGE:
                return
            same_size = source.status.st_size == source.bytes
            yield source, same_size and manifest.digest(source.file) == source.digest


def lost(config: Config, folder: Path) -> str | None:
    """The error message if a model or dataset is missing that was a local folder when `folder`, the assets of a run,
    was written. Snakemake would mistake its name for a Hub id, and make everything again.
    """
    try:
        paths = {source["path"] for source in recorded(folder).values()}
    except (OSError, ValueError, KeyError):
        return None
    for _, folder in _by_name(config):
        if str(folder) in paths and not folder.exists():
            return f"{folder} is missing, but the run began with this folder; put it back, or give the run another name"
    return None


def recorded(folder: Path) -> dict[str, Any]:
    """The entries in assets.json for files that are neither the run's own nor from the Hub."""
    assets = json.loads((folder / ASSETS).read_text(encoding="utf-8"))
    entries = {name: entry for name, entry in assets.items() if isinstance(entry, dict)}
    return {name: entry for name, entry in entries.items() if entry["revision"] is None and entry["files"]}


def are_pinned(config: Config) -> bool:
    """True if the run names the commit of everything that it fetches from the Hub, so that it always gets the same."""
    fetched = (source for source, folder in _by_name(config) if not folder.is_dir())
    return all(COMMIT.fullmatch(source.revision or "") for source in fetched)
