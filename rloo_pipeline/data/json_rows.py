"""Reads rows of JSON and JSON Lines without guessing types: a column must hold one kind of value in all rows.

Readers that guess types convert a whole column to numbers because of one number among strings ("007" becomes 7), and
strings that look like dates to dates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError

KINDS = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class LocatedRow(NamedTuple):
    """A row and its place in the file, such as `line 3`."""

    where: str
    row: dict[str, Any]


def read(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """All rows, each with all columns of the file in order of appearance; None where a row lacks a column.

    A column with integers and floats becomes one of floats.

    Args:
        path: JSON Lines, or one list of objects.
        most: read only this many rows.

    Raises:
        UserError: the file is empty, not UTF-8 or not JSON, a row is not an object, or a column holds values of several
            kinds. The message names the file, the line (in a list the row, from 0) and the column.
    """
    located = list(islice(objects(path), most))
    if not located:
        raise UserError(f"{path}: is empty; add rows or correct the path")
    first: dict[str, tuple[str, str]] = {}
    for where, row in located:
        for name, value in row.items():
            _check_kind(value, name, f"{path}, {where}", where, first)
    names = dict.fromkeys(name for _, row in located for name in row)
    mixed = {name for name in names if len({type(row.get(name)) for _, row in located} & {int, float}) > 1}
    for _, row in located:
        row.update({name: float(row[name]) for name in mixed if isinstance(row.get(name), int)})
    return [{name: row.get(name) for name in names} for _, row in located]


def objects(path: Path) -> Iterator[LocatedRow]:
    """The rows one by one, unchanged.

    Raises:
        UserError: a line is not UTF-8, not JSON, or not an object.
    """
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"[") and path.suffix != ".jsonl":
            rows = _parsed(_decoded(file.read(), path, 1), path, 1)
            for number, row in enumerate(rows):
                yield LocatedRow(f"row {number}", _object(row, f"{path}, row {number}"))
            return
        for number, line in enumerate(file, 1):  # only at line feeds: strings may contain other line separators
            if line.strip():
                row = _parsed(_decoded(line.rstrip(b"\r\n"), path, number), path, number)
                yield LocatedRow(f"line {number}", _object(row, f"{path}, line {number}"))


def _decoded(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += error.object[: error.start].count(b"\n")  # without a byte order mark
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}, line {line}: not UTF-8 ({byte}); save the file as UTF-8") from error


def _parsed(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        message = f"{path}, line {line}: not JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
        by_line = path.suffix == ".jsonl" or error.msg == "Extra data" or line == 1
        hint = "each line must be one whole object" if by_line else "correct it there"
        raise UserError(f"{message}; {hint}") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds {KINDS.get(type(row), 'null')}, not an object with columns")
    return row


def _check_kind(value: Any, name: str, location: str, where: str, first: dict[str, tuple[str, str]]) -> None:
    """Compares the kind of a value, and of its items, with the first value of its column."""
    if value is None:
        return
    kind = KINDS[type(value)]
    first_kind, first_where = first.setdefault(name, (kind, where))
    if first_kind != kind:
        raise UserError(
            f"{location}: column '{name}' holds {kind} ({value!r:.40}) and {first_kind} in {first_where}; "
            "write one kind in all rows"
        )
    if type(value) is list:
        for item in value:
            _check_kind(item, f"{name}[]", location, where, first)
    elif type(value) is dict:
        for key, item in value.items():
            _check_kind(item, f"{name}.{key}", location, where, first)
