"""Allows only plain values and one kind of value per column, so that every stage reads the data unchanged.

Readers that guess types turn a whole column into numbers because of one number among strings ("007" becomes 7), and
turn strings that look like dates into dates.
"""

import datetime
import decimal
from collections.abc import Iterable
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError

Row = dict[str, Any]
KINDS: dict[type, str] = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
    datetime.datetime: "a time",
    datetime.date: "a date",
    datetime.time: "a time of day",
    datetime.timedelta: "a duration",
    decimal.Decimal: "a decimal number",
}
"""Types of plain values and their names in messages; a subclass gets the first type that matches."""
DEEPEST = 100
"""Maximum nesting of lists and objects."""
LONGEST = 10_000
"""Maximum bits of an integer; Python refuses to write numbers of more than 4,300 digits."""


class LocatedRow(NamedTuple):
    """A row and its source: the file or generator, and the position in it, such as `line 3`."""

    source: str
    where: str
    row: Row


def are_messages(value: Any, role: str = "role") -> bool:
    """True if a value is a list of messages, each with a role, which has this key."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(message, dict) and role in message for message in value)


def uniform(located: Iterable[LocatedRow]) -> list[Row]:
    """Gives all rows the same columns, in order of appearance; a missing value becomes None.

    NumPy numbers and arrays become Python's, tuples become lists, and columns with integers and floats become floats.

    Raises:
        UserError: a column holds values of several kinds, or a value that is not plain. The message names the source,
            the row and the column.
    """
    first: dict[str, tuple[str, str]] = {}
    places, rows = list[tuple[str, str]](), list[Row]()
    for source, where, row in located:  # one row is in memory twice, not all
        places.append((source, where))
        plain = {
            _key(name, f"{source}, {where}: the row"): _plain(value, name, f"{source}, {where}", where, first, 0)
            for name, value in row.items()
        }
        rows.append(plain)
    names = dict.fromkeys(name for row in rows for name in row)
    mixed = {name for name in names if {int, float} <= {type(row.get(name)) for row in rows}}
    for number, ((source, where), row) in enumerate(zip(places, rows, strict=True)):
        row.update({name: _float(row[name], f"{source}, {where}: column '{name}'") for name in mixed & row.keys()})
        if [*row] != [*names]:
            rows[number] = {name: row.get(name) for name in names}
    return rows


def _plain(value: Any, name: str, location: str, where: str, first: dict[str, tuple[str, str]], depth: int) -> Any:
    """Converts a value to Python's own types; its kind must be that of the column's first value that is not None."""
    if value is None:
        return None
    place = f"{location}: column '{name}'"
    if type(value).__module__ == "numpy":
        value = value.tolist()
    base = next((base for base in KINDS if isinstance(value, base)), list if isinstance(value, tuple) else None)
    if base is None and hasattr(value, "tobytes") and hasattr(value, "convert"):
        return value  # a PIL image, which data/images.py reads
    if base is None:
        raise UserError(
            f"{place} holds a {type(value).__name__} ({value!r:.40}); use strings, numbers, true or "
            "false, dates, bytes, or lists and objects of these"
        )
    if isinstance(value, int) and value.bit_length() > LONGEST:
        raise UserError(f"{place} has a number of {value.bit_length():,} bits; write it as text")
    kind = KINDS[base]
    first_kind, first_where = first.setdefault(name, (kind, where))
    if first_kind != kind:
        raise UserError(
            f"{place} holds {kind} ({value!r:.40}) and {first_kind} in {first_where}; write one kind in all rows"
        )
    if depth > DEEPEST:
        raise UserError(f"{location}: column '{name:.20}…' is nested more than {DEEPEST} levels deep; flatten it")
    if base is list:
        inner = f"{name}[]"
        return [_plain(item, inner, location, where, first, depth + 1) for item in value]
    if base is dict:
        return {
            _key(key, place): _plain(item, f"{name}.{key}", location, where, first, depth + 1)
            for key, item in value.items()
        }
    if base is str:
        return _text(value, place)
    return base(value) if base in (int, float) and type(value) is not base else value


def _key(key: Any, place: str) -> str:
    if not isinstance(key, str):
        raise UserError(f"{place} has the key {key!r:.40}, which is not a string; put it into quotes")
    return _text(key, place)


def _text(value: str, place: str) -> str:
    """Returns a plain str that UTF-8 can encode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} has half of a character (\\u{ord(value[error.start]):04x}, a lone surrogate) "
            f"at position {error.start}; correct the text"
        ) from error
    return str.__str__(value)


def _float(value: Any, location: str) -> float | None:
    """Converts a number in a column that has both integers and floats."""
    if value is None:
        return None
    try:
        converted = float(value)
    except OverflowError:
        converted = float("inf")
    if isinstance(value, int) and converted != value:
        raise UserError(
            f"{location} holds the integer {value!s:.40}, which would be rounded, since the column also has fractions; "
            "write the column as text"
        )
    return converted
