"""Rows of JSON and JSON Lines as they stand in the file: a column holds one kind of value in all rows, or it is an
error.

Readers that guess types take one number among texts as a reason to make numbers of all of them ("007" is then 7), and
texts that look like dates to make dates of them. Here nothing is guessed.
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


class Found(NamedTuple):
    """A row and where it stands, such as `line 3`."""

    where: str
    row: dict[str, Any]


def read(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Rows with all columns of the file, in the order in which they come up; null where a row has none itself.

    Args:
        path: JSON Lines, or one list of objects.
        most: the first so many rows alone; all where not given.

    Raises:
        UserError: it is empty, not UTF-8 or not JSON, a row is no object, or a column holds values of several kinds.
            The message names the file, the line (in a list the row, from 0 on) and the column.
    """
    found = list(islice(objects(path), most))
    if not found:
        raise UserError(f"{path}: is empty, there is no row in it")
    first: dict[str, tuple[str, str]] = {}
    for where, row in found:
        for name, value in row.items():
            _compare(value, name, f"{path}, {where}", where, first)
    names = dict.fromkeys(name for _, row in found for name in row)
    mixed = {name for name in names if len({type(row.get(name)) for _, row in found} & {int, float}) > 1}
    for _, row in found:
        row.update({name: float(row[name]) for name in mixed if isinstance(row.get(name), int)})
    return [{name: row.get(name) for name in names} for _, row in found]


def objects(path: Path) -> Iterator[Found]:
    """The rows one by one, as they are.

    Raises:
        UserError: a line is not UTF-8, not JSON, or no object.
    """
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"[") and path.suffix != ".jsonl":
            whole = _parsed(_decoded(file.read(), path, 1), path, 1)
            for number, row in enumerate(whole):
                yield Found(f"row {number}", _object(row, f"{path}, row {number}"))
            return
        for number, line in enumerate(file, 1):  # by line feeds alone: strings may hold other ends of lines
            if line.strip():
                row = _parsed(_decoded(line.rstrip(b"\r\n"), path, number), path, number)
                yield Found(f"line {number}", _object(row, f"{path}, line {number}"))


def _decoded(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += data[: error.start].count(b"\n")
        byte = f"byte 0x{data[error.start]:02x}"
        raise UserError(f"{path}, line {line}: not UTF-8 ({byte}); save the file in that encoding") from error


def _parsed(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        said = f"{path}, line {line}: not JSON: {error.msg.removesuffix(' at')} at character {error.colno}"
        lines = path.suffix == ".jsonl" or error.msg == "Extra data" or line == 1
        raise UserError(f"{said}; {'each line must be one whole object' if lines else 'mend it there'}") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds {KINDS.get(type(row), 'null')}, not an object with columns")
    return row


def _compare(value: Any, name: str, place: str, where: str, first: dict[str, tuple[str, str]]) -> None:
    """Holds the kind of a value, and of what is in it, against the kind of the first one of its column."""
    if value is None:
        return
    kind = KINDS[type(value)]
    before, since = first.setdefault(name, (kind, where))
    if before != kind:
        raise UserError(
            f"{place}: column '{name}' holds {kind} ({value!r:.40}) and {before} in {since}; write one kind in all rows"
        )
    if type(value) is list:
        for item in value:
            _compare(item, f"{name}[]", place, where, first)
    elif type(value) is dict:
        for key, item in value.items():
            _compare(item, f"{name}.{key}", place, where, first)
