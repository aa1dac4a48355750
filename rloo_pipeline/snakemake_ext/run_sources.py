"""What stage-assets reads: local files, which its rule watches, and repositories of the Hub, whose commits pin them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rloo_pipeline.config import Config
from rloo_pipeline.preflight import dataset_inputs

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
    if config.model.name_or_path:
        files.append(Path(config.model.name_or_path) / "config.json")
    return [file for file in files if file.is_file()]


def _files_in(folder: Path) -> list[Path]:
    """Files that `datasets.load_dataset` may read in a folder: none that are hidden, or in a hidden folder."""
    found = sorted(folder.rglob("*"))
    return [file for file in found if not any(part[0] == "." for part in file.relative_to(folder).parts)]


def are_pinned(config: Config) -> bool:
    """Whether the run gets the same from the Hub at any time: it names the commit of all that it fetches there."""
    return all(COMMIT.fullmatch(revision or "") for revision in _revisions(config))


def _revisions(config: Config) -> Iterator[str | None]:
    """Revisions of all that is fetched from the Hub, as configured."""
    for source in dataset_inputs.sources(config).values():
        if source.name and not (Path(config.data_dir or ".") / source.name).is_dir():
            yield source.revision
    if config.model.name_or_path and not Path(config.model.name_or_path).is_dir():
        yield config.model.revision
