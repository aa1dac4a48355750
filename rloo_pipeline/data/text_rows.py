"""Reads rows from JSON, JSON Lines, CSV and TSV files."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from rloo_pipeline.data.kinds import KINDS, LocatedRow, Row, uniform
from rloo_pipeline.errors import UserError, counted

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".json", *DELIMITERS)


def read(path: Path, most: int | None = None) -> list[Row]:
    """All rows, as returned by `kinds.uniform`.

    Args:
        path: JSON Lines, one list of objects, or a table whose first line names its columns; its values are text.
        most: number of rows to read; all by default.

    Raises:
        UserError: the file is empty, not UTF-8, not JSON or not a table, a row is not an object, or `kinds.uniform`
            refuses a row. The message names the file, the line (in a list, the row from 0) and the column.
    """
    rows = uniform(islice(objects(path), most))
    if not rows:
        raise UserError(f"{path}: is empty; add rows or correct the path")
    return rows


def objects(path: Path) -> Iterator[LocatedRow]:
    """The rows one by one, unchanged.

    Raises:
        UserError: a line is not UTF-8, not JSON, not an object, or has other fields than the first one.
    """
    if path.suffix in DELIMITERS:
        yield from of_table(path, DELIMITERS[path.suffix])
        return
    with _opened(path) as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"[") and path.suffix != ".jsonl":
            for number, row in enumerate(_parsed(_decoded(file.read(), path, 1), path, 1)):
                yield _located(path, f"row {number}", row)
            return
        for number, line in enumerate(file, 1):  # splits only at line feeds: strings may contain other line separators
            if line.strip():
                row = _parsed(_decoded(line.rstrip(b"\r\n"), path, number), path, number)
                yield _located(path, f"line {number}", row)


def of_table(path: Path, delimiter: str) -> Iterator[LocatedRow]:
    """The rows of a table, one by one. A column without a name, such as pandas' index, is left out.

    Raises:
        UserError: see `objects`; or two columns have the same name.
    """
    with _opened(path) as file:
        text = _decoded(file.read(), path, 1)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # of the whole process
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names, next_line = list[str](), 1
    try:
        for fields in reader:
            line, next_line = next_line, reader.line_num + 1
            if not fields:
                continue
            if not names:
                names = fields
                if twice := next((name for name in names if name and names.count(name) > 1), None):
                    raise UserError(f"{path}, line {line}: two columns have the name '{twice}'; rename one")
                continue
            if len(fields) != len(names):
                raise UserError(
                    f"{path}, line {line}: {counted(len(fields), 'field')} for {counted(len(names), 'column')}; put "
                    "quotes around texts that contain the delimiter"
                )
            row = {name: field for name, field in zip(names, fields, strict=True) if name}
            yield LocatedRow(str(path), f"line {line}", row)
    except csv.Error as error:
        hint = "close the quotes that begin there, and double quotation marks inside them"
        raise UserError(f"{path}, line {next_line}: not {path.suffix} ({error}); {hint}") from error


def _opened(path: Path) -> IO[bytes]:
    """Opens the file; decompresses it if its suffix says that it is compressed."""
    if path.suffix in SUFFIXES:
        return path.open("rb")
    import fsspec  # type: ignore[import-untyped]

    file: IO[bytes] = fsspec.open(str(path), "rb", compression="infer").open()
    return file


def _decoded(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")  # error.object has no byte order mark
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}, line {line}: not UTF-8 ({byte}); save the file as UTF-8") from error


class _RepeatedKeyError(Exception):
    """An object has a key twice, of which Python would keep the last."""


def _object(pairs: list[tuple[str, Any]]) -> Row:
    if len(row := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return row


def _parsed(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except _RepeatedKeyError as error:
        where = "" if "\n" in text else f", line {line}"
        raise UserError(f"{path}{where}: an object has the key '{error}' twice; remove one") from error
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        message = f"{path}, line {line}: not JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
        by_line = path.suffix == ".jsonl" or error.msg == "Extra data" or line == 1
        hint = "each line must be one whole object" if by_line else "correct it there"
        raise UserError(f"{message}; {hint}") from error
    except RecursionError as error:
        raise UserError(f"{path}, line {line}: lists or objects are nested too deeply; flatten them") from error
    except ValueError as error:  # Python limits the digits of integers
        digits = sys.get_int_max_str_digits()
        raise UserError(f"{path}, line {line}: a number has more than {digits:,} digits; write it as text") from error


def _located(path: Path, where: str, row: Any) -> LocatedRow:
    if not isinstance(row, dict):
        kind = KINDS.get(type(row), "null")
        raise UserError(f"{path}, {where}: holds {kind}, not an object with columns; write one object per row")
    return LocatedRow(str(path), where, row)
