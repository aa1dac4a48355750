"""Reads the rows of a dataset source as plain dictionaries, offline, from the files that stage-assets placed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rloo_pipeline import import_string
from rloo_pipeline.config import Source
from rloo_pipeline.data import text_rows
from rloo_pipeline.data.kinds import LocatedRow, are_messages, uniform
from rloo_pipeline.data.kinds import Row as Row
from rloo_pipeline.errors import UserError, one_line, raise_disk_error

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

FORMATS = (*text_rows.SUFFIXES, ".parquet")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
SHARD = re.compile(r"(.*-)\d{5}-of-(\d{5})(\..*)")
"""Matches names of files that hold a part of a split each, as the Hub's."""


def read_rows(source: Source, path: str) -> list[Row]:
    """All rows of a source.

    Args:
        source: section of the configuration.
        path: path of the source in assets.json.

    Raises:
        UserError: the source cannot be read, or has no rows; the message names the file and, where possible, line and
            column.
    """
    rows = _generated(source) if source.generator is not None else _loaded(source, Path(path))
    if not rows:
        raise UserError(f"{path}: the dataset is empty; give another source")
    return _without_fill(rows[: source.max_rows])


def _generated(source: Source) -> list[Row]:
    """The rows of a generator, each with all columns in order of appearance; None if a row lacks a column."""
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
        said = ": ".join(filter(None, (type(error).__name__, one_line(error))))
        raise UserError(f"the generator {name} raised {said}{where}") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(
                f"the generator {name} yielded a {type(row).__name__} as row {number}; it must yield dicts of columns"
            )
    return uniform(LocatedRow(f"the generator {name}", f"row {number}", row) for number, row in enumerate(rows))


def _loaded(source: Source, path: Path) -> list[Row]:
    if path.is_file():
        check_file(path)
        if path.suffix in text_rows.SUFFIXES:
            return text_rows.read(path, source.max_rows)
    try:
        if path.parent.name == "snapshots" and len(path.name) == 40:  # a commit in the Hub's cache never changes
            return _by_datasets(source, path)
        with TemporaryDirectory() as cache:  # from its own, `datasets` may take the rows of an older file of this name
            return _by_datasets(source, path, cache)
    except UserError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        raise_disk_error(cause, path)
        damaged = _first_damaged(path)
        reason = f"{type(cause).__name__}: {one_line(cause)}"
        hint = "" if path.is_file() else "; check its files, and config_name and split of the source"
        raise UserError(f"{damaged or f'{path}: cannot be read as a dataset'} ({reason}){hint}") from error


def _by_datasets(source: Source, path: Path, cache: str | None = None) -> list[Row]:
    """Reads rows with `datasets.load_dataset`, so that every dataset of the Hub is supported. Text stays text.

    CSV columns are text unless the dataset declares types. JSON is read like a local JSON file, and so is CSV except on
    the Hub. `cache` is the folder for converted and extracted files; None for a dataset of the Hub.
    """
    import datasets
    from pyarrow import parquet

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the exception has the reason
    datasets.disable_progress_bars()
    if path.is_file():
        if not parquet.read_metadata(path).num_rows:  # which `datasets` cannot read
            return []
        return _first(datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=cache), source)
    builder = datasets.load_dataset_builder(str(path), name=source.config_name, cache_dir=cache)
    if cache is not None:
        _check_shards(builder)
        _check_formats(builder, path)
    place = {"name": source.config_name, "split": source.split, "cache_dir": cache}
    kind, declared = type(builder).__module__.rpartition(".")[2], builder.info.features
    if kind == "json" and builder.config.field is None:
        return _as_declared(_of_files(builder, source, cache, text_rows.objects), declared)
    if kind != "csv":
        return _first(datasets.load_dataset(str(path), **place), source)
    delimiter = _delimiter(builder)
    if cache is not None and delimiter is not None:
        read = partial(text_rows.of_table, delimiter=delimiter)
        return _as_declared(_of_files(builder, source, cache, read), declared)
    features = _text_features(builder, cache)
    rows = _first(datasets.load_dataset(str(path), **place, features=features, keep_default_na=False), source)
    return _as_declared(rows, declared)


def _delimiter(builder: DatasetBuilder) -> str | None:
    """The delimiter of CSV files; None if the dataset declares other options, which pandas knows.

    pandas takes the first column for an index if all lines end with a delimiter, and fills lines that are too short.
    """
    options, own = builder.config.pd_read_csv_kwargs, type(builder.config)(name="default").pd_read_csv_kwargs
    delimiter: str = options["sep"]
    return delimiter if options == own | {"sep": delimiter} and len(delimiter) == 1 else None


def _check_shards(builder: DatasetBuilder) -> None:
    """Raises UserError if a file's name says that it is one of several, as `train-00000-of-00003.parquet`, and another
    one is not there, as after a download that was interrupted.
    """
    files = {*map(Path, chain.from_iterable((builder.config.data_files or {}).values()))}
    series = {(str(file.parent), *match.groups()) for file in files if (match := SHARD.fullmatch(file.name))}
    for folder, start, count, end in sorted(series):
        numbers = [Path(folder, f"{start}{number:05d}-of-{count}{end}") for number in range(int(count) + 1)]
        from_one = numbers[-1].exists()
        for file in numbers[from_one : int(count) + from_one]:
            if not file.exists():
                raise UserError(
                    f"{file}: missing, though other files of the {int(count)} are there; fetch it again, or rename the "
                    "others to use them without it"
                )


def _check_formats(builder: DatasetBuilder, folder: Path) -> None:
    """Raises UserError if a folder has rows in files of several formats, of which `datasets` reads the commonest. Files
    of other formats that end with .json may hold something else.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns
    from huggingface_hub import DatasetCard

    card = folder / "README.md"
    if card.is_file() and DatasetCard.load(card).data.get("configs"):
        return  # it says which files are the data
    place, read = str(folder.resolve()), builder.config.data_files
    of_splits = DataFilesDict.from_patterns(get_data_patterns(place), place, sorted({*FORMATS} - {".json"}))
    for split, files in of_splits.items():
        if other := sorted({*map(str, files)} - {*map(str, read.get(split, ()))}):
            raise UserError(
                f"{other[0]}: would not be read, since {next(iter(map(str, read.get(split, ()))), 'the data')} has "
                "another format; move one of them out of the folder, or name the file in `path`"
            )


def _first(dataset: Dataset, source: Source) -> list[Row]:
    """The rows that `max_rows` asks for; the others may be more than memory holds as Python's objects."""
    count = len(dataset) if source.max_rows is None else min(source.max_rows, len(dataset))
    rows: list[Row] = dataset.select(range(count)).to_list()
    return rows


def _of_files(
    builder: DatasetBuilder, source: Source, cache: str | None, read: Callable[[Path], Iterator[LocatedRow]]
) -> list[Row]:
    """The rows that `read` yields of each file of a split, of all splits, or of an expression such as `train[:100]`. Of
    a split, only the first `max_rows` are read.
    """
    import datasets

    split, of_splits = source.split, builder.config.data_files
    wanted, limit = ({split: of_splits[split]}, source.max_rows) if split in of_splits else (of_splits, None)
    parts = {
        str(name): [*islice(chain.from_iterable(map(read, _all_unpacked(files, cache))), limit)]
        for name, files in wanted.items()
    }
    instruction = datasets.ReadInstruction.from_spec("+".join(parts) if split == "all" else split)
    chosen = instruction.to_absolute({name: len(rows) for name, rows in parts.items()})
    return uniform(row for part in chosen for row in parts[part.splitname][part.from_ : part.to])


def _all_unpacked(files: Iterable[str], cache: str | None) -> Iterator[Path]:
    """The files of archives, which are extracted into `cache`, and the other files, which may be compressed."""
    import datasets

    manager = datasets.DownloadManager(download_config=datasets.DownloadConfig(cache_dir=cache))
    for file in map(str, files):
        yield from map(Path, manager.iter_files(manager.extract(file)) if file.endswith(ARCHIVES) else [file])


def _text_features(builder: DatasetBuilder, cache: str | None) -> Any:
    """Features that read all columns of CSV files as text."""
    import datasets
    import pandas as pd

    first = next(_all_unpacked(chain.from_iterable(builder.config.data_files.values()), cache))
    options = {**builder.config.pd_read_csv_kwargs, "nrows": 0, "chunksize": None, "iterator": False}
    return datasets.Features({str(name): datasets.Value("string") for name in pd.read_csv(first, **options).columns})


def _as_declared(rows: list[Row], features: Any) -> list[Row]:
    """Converts rows to the types that the dataset declares, if any; empty text in other columns becomes null."""
    if features is None:
        return rows
    import datasets

    empty = {name: () if getattr(kind, "dtype", None) == "string" else ("",) for name, kind in features.items()}
    columns = {name: [None if row.get(name) in empty[name] else row.get(name) for row in rows] for name in features}
    converted: list[Row] = datasets.Dataset.from_dict(columns).cast(features).to_list()
    return converted


def _without_fill(rows: list[Row]) -> list[Row]:
    """Removes null keys from messages, as TRL does: Arrow gives each message, and each tool call, the keys of all
    others, which a chat template would fail on or write as arguments. Generators and JSON files have them from there.
    """
    for row in rows:
        for name, value in row.items():
            if are_messages(value) and any({"content", "tool_calls"} & message.keys() for message in value):
                row[name] = _without_nulls(value)
    return rows


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def check_file(path: Path) -> None:
    """Checks a file's format and size.

    Raises:
        UserError: the format is unknown, or the file is empty.
    """
    if path.suffix not in FORMATS:
        raise UserError(
            f"{path}: dataset files can be {', '.join(FORMATS)}; convert it to one of them or use a generator"
        )
    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; add rows or correct the path")


def _first_damaged(path: Path) -> str | None:
    """The first damaged file in a folder, or the file itself, for a message; None if no file is damaged."""
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


def _root_cause(error: BaseException) -> BaseException:
    """The exception at the end of the chain of causes."""
    return error if error.__cause__ is None else _root_cause(error.__cause__)
