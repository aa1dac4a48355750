"""Rows of a dataset source, as plain dictionaries, read offline from what stage-assets put in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rloo_pipeline import references
from rloo_pipeline.config import Source
from rloo_pipeline.errors import UserError

Row = dict[str, Any]
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_rows(source: Source, path: str) -> list[Row]:
    """All rows of a source.

    Args:
        source: as configured.
        path: where assets.json says it lies.

    Raises:
        UserError: it cannot be read, or has no rows.
    """
    rows = _generated(source) if source.generator is not None else _loaded(source, Path(path))
    if not rows:
        raise UserError(f"{path}: the dataset is empty")
    return rows[: source.max_rows]


def _generated(source: Source) -> list[Row]:
    function = references.load(str(source.generator))
    try:
        return list(function(**source.options))
    except TypeError as error:
        raise UserError(f"options of the generator {source.generator} do not fit it: {error}") from error


def _loaded(source: Source, path: Path) -> list[Row]:
    """Through `datasets`, so that whatever it reads on a Hub is read here."""
    import datasets

    try:
        if path.is_file():
            if path.suffix not in FORMATS:
                raise UserError(f"{path}: known dataset files are {', '.join(FORMATS)}; for others give a generator")
            loaded = datasets.load_dataset(FORMATS[path.suffix], data_files=str(path), split="train")
        else:
            loaded = datasets.load_dataset(str(path), source.config_name, split=source.split)
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        raise UserError(
            f"{path}: cannot be read as a dataset ({type(cause).__name__}: {' '.join(str(cause).split())[:160]})"
        ) from error
    rows: list[Row] = loaded.to_list()
    return rows
