"""Reads the rows of a dataset source as plain dictionaries, offline, from the files that stage-assets placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rloo_pipeline import import_string
from rloo_pipeline.config import Source
from rloo_pipeline.data import json_rows
from rloo_pipeline.errors import UserError, one_line

Row = dict[str, Any]
JSON = (".jsonl", ".json")
FORMATS = (*JSON, ".parquet")


def read_rows(source: Source, path: str) -> list[Row]:
    """All rows of a source.

    Args:
        source: section of the configuration.
        path: place of the source according to assets.json.

    Raises:
        UserError: the source cannot be read, or has no rows; the message names the file and, where possible, line and
            column.
    """
    rows = _generated(source) if source.generator is not None else _loaded(source, Path(path))
    if not rows:
        raise UserError(f"{path}: the dataset is empty; give another source")
    return rows[: source.max_rows]


def _generated(source: Source) -> list[Row]:
    """The rows of a generator, each with all columns in order of appearance; None where a row lacks a column."""
    name = str(source.generator)
    function = import_string.load(name)
    try:
        rows = list(function(**source.options))
    except UserError:
        raise
    except Exception as error:
        where = import_string.error_location(error, name)
        if isinstance(error, TypeError) and not where:
            raise UserError(f"options of the generator {name} do not fit it: {error}") from error
        raise UserError(f"the generator {name} raised {type(error).__name__}: {one_line(error)}{where}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(
                f"the generator {name} gave a {type(row).__name__} as row {number}; it must give dicts of columns"
            )
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def _loaded(source: Source, path: Path) -> list[Row]:
    if path.is_file():
        check_file(path)
        if path.suffix in JSON:
            return json_rows.read(path, source.max_rows)
        return _by_datasets(path, "parquet", data_files=str(path), split="train")
    for file in sorted(path.rglob("*.jsonl")):
        json_rows.read(file)  # raises where `datasets` would guess types
    return _by_datasets(path, str(path), name=source.config_name, split=source.split)


def check_file(path: Path) -> None:
    """Checks a file's format and size.

    Raises:
        UserError: the format is unknown, or the file is empty.
    """
    if path.suffix not in FORMATS:
        raise UserError(
            f"{path}: known dataset files are {', '.join(FORMATS)}; convert it to one of them or use a generator"
        )
    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; add rows or correct the path")


def _by_datasets(path: Path, *args: str, **kwargs: Any) -> list[Row]:
    """The rows that `datasets.load_dataset` reads, so every dataset of the Hub is supported."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the exception has the reason
    try:
        rows: list[Row] = datasets.load_dataset(*args, **kwargs).to_list()
    except Exception as error:
        damaged = _damaged(path)
        cause = _root(error)
        reason = f"{type(cause).__name__}: {one_line(cause)}"
        hint = "" if path.is_file() else "; check its files, and config_name and split of the source"
        raise UserError(f"{damaged or f'{path}: cannot be read as a dataset'} ({reason}){hint}") from error
    return rows


def _damaged(path: Path) -> str | None:
    """The first damaged file in a folder, or the file itself, for a message; None where no file is damaged."""
    import csv

    import pyarrow.parquet

    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        try:
            if file.suffix == ".parquet":
                pyarrow.parquet.read_table(file)
            elif file.suffix == ".csv":
                widths: set[int] = set()
                with file.open(newline="", encoding="utf-8") as lines:
                    for line in (reader := csv.reader(lines)):
                        widths.add(len(line))
                        if len(widths - {0}) > 1:
                            return f"{file}, line {reader.line_num}: {len(line)} fields, unlike the lines before"
        except (OSError, ValueError):  # Arrow's exceptions derive from these
            return f"{file}: truncated or damaged"
    return None


def _root(error: BaseException) -> BaseException:
    """The exception at the end of the chain of causes."""
    return error if error.__cause__ is None else _root(error.__cause__)
