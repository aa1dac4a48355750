"""What the examiner and the program say to each other: a line of JSON a message, values as plain data.

Plain data are None, bool, int, float, str, complex, bytes, Decimal, Fraction, dates, range, and lists, tuples, sets and
dicts of them; they arrive as exactly these types, whatever subclass was sent. Everything else is referred to: the
sender keeps it and sends its number. Nothing that arrives is code and nothing is unpickled, so a message can be wrong
but do no harm.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

CONTAINERS = {"l": list, "t": tuple, "s": set, "f": frozenset}
WRITTEN: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "i": (int, hex, lambda text: int(text, 16)),
    "c": (complex, repr, complex),
    "b": (bytes, bytes.hex, bytes.fromhex),
    "D": (Decimal, str, Decimal),
    "F": (Fraction, str, Fraction),
    "T": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "d": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}


class Wire:
    """Messages over a pair of pipes."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: Any) -> None:
        """Sends a message."""
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other side is gone.
            ValueError: it is no message.
        """
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side is gone")
        return json.loads(line)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as JSON; `refer` gives the reference to what is no plain data."""
    plain: Any
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            exact = value if type(value) is plain else plain(value)
            return ["i", hex(exact)] if plain is int and abs(exact) >> 63 else exact
    if value is None:
        return None
    for tag, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [tag, [encode(item, refer) for item in value]]
    if isinstance(value, dict):
        return ["m", [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
    for tag, (written, write, _) in WRITTEN.items():
        if isinstance(value, written):
            return [tag, write(value)]
    if isinstance(value, range):
        return ["r", [value.start, value.stop, value.step]]
    if isinstance(value, datetime.timedelta):
        return ["y", [value.days, value.seconds, value.microseconds]]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy's
        return encode(value.item(), refer)
    return refer(value)


def decode(message: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` was given; `resolve` finds what a reference means."""
    if not isinstance(message, list):
        return message
    tag, content = message
    if tag in CONTAINERS:
        return CONTAINERS[tag]([decode(item, resolve) for item in content])
    if tag == "m":
        return {decode(key, resolve): decode(item, resolve) for key, item in content}
    if tag in WRITTEN:
        return WRITTEN[tag][2](content)
    if tag == "r":
        return range(*content)
    if tag == "y":
        return datetime.timedelta(*content)
    return resolve(tag, content)
