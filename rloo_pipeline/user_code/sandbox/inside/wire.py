"""Messages between the examiner and the program: each is a line of JSON, with values as plain data.

Plain data is None, bool, int, float, str, complex, bytes, Decimal, Fraction, dates, range, builtin types, lists,
tuples, sets, deques and dicts of these, and NumPy scalars and arrays of numbers, strings or times. It arrives as
exactly these types, even if a subclass was sent. Any other object stays with the sender, which sends its number as a
reference. Messages contain neither code nor pickles, so a bad message does no harm.
"""

import builtins
import datetime
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

KINDS: dict[str, tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    "l": (list, iter, lambda *items: list(items)),
    "t": (tuple, iter, lambda *items: items),
    "s": (set, iter, lambda *items: set(items)),
    "f": (frozenset, iter, lambda *items: frozenset(items)),
    "q": (deque, lambda d: [d.maxlen, *d], lambda most, *items: deque(items, most)),
    "m": (dict, lambda d: d.items(), lambda *items: dict(items)),
    "i": (int, lambda number: [hex(number)], lambda text: int(text, 16)),
    "c": (complex, lambda number: [repr(number)], complex),
    "b": (bytes, lambda data: [data.hex()], bytes.fromhex),
    "D": (Decimal, lambda number: [str(number)], Decimal),
    "F": (Fraction, lambda number: [str(number)], Fraction),
    "T": (datetime.datetime, lambda time: [time.isoformat()], datetime.datetime.fromisoformat),
    "d": (datetime.date, lambda date: [date.isoformat()], datetime.date.fromisoformat),
    "y": (datetime.timedelta, lambda t: [t.days, t.seconds, t.microseconds], datetime.timedelta),
    "r": (range, lambda r: [r.start, r.stop, r.step], range),
}
"""Kinds of plain data by their tag: type, parts of a value, and the function that makes the value from its parts."""


class Wire:
    """Messages over standard input and output, which other code in this process can then no longer use."""

    def __init__(self) -> None:
        self._reader, self._writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)

    def send(self, message: Any) -> None:
        """Sends a message."""
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            EOFError: the other process died.
            ValueError: the line is not JSON.
        """
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other process died")
        return json.loads(line)


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Encodes a value as JSON: a string, number, True, False or None as itself, others as a list of a tag and parts;
    `refer` makes a reference for an object that is not plain data.
    """
    plain: Any
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            exact = value if type(value) is plain else plain(value)
            return ["i", hex(exact)] if plain is int and abs(exact) >> 63 else exact
    if value is None:
        return None
    if isinstance(value, type) and builtin_base(value) is value:
        return ["x", value.__name__]
    for tag, (kind, parts_of, _) in KINDS.items():
        if isinstance(value, kind):
            return [tag, *(encode(part, refer) for part in parts_of(value))]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), refer)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcSUmM":
        return ["n", value.dtype.str, encode(value.shape, refer), value.tobytes().hex()]
    return refer(value)


def decode(message: Any, resolve: Callable[..., Any]) -> Any:
    """Decodes a value; `resolve` returns the object for a reference."""
    if not isinstance(message, list):
        return message
    tag, *encoded = message
    parts = [decode(part, resolve) for part in encoded]
    if tag in KINDS:
        return KINDS[tag][2](*parts)
    if tag == "x":
        return builtin_type(*parts)
    if tag == "n":
        return _array(*parts)
    return resolve(tag, *parts)


def _array(dtype: str, shape: tuple[int, ...], data: str) -> Any:
    import numpy

    return numpy.frombuffer(bytes.fromhex(data), numpy.dtype(dtype)).reshape(shape).copy()


def builtin_type(name: str) -> type:
    """Returns a builtin type by name; raises ValueError for any other name, such as `eval`."""
    value = getattr(builtins, name, None)
    if not isinstance(value, type):
        raise ValueError(f"{name} is not a builtin type")
    return value


def builtin_base(kind: type) -> type:
    """Returns a class, if it is a builtin type, or else its nearest base class that is one."""
    builtin: type = next(base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)
    return builtin


def encode_error(error: BaseException) -> list[Any]:
    """Encodes an exception: names of its class and of the nearest builtin class, plain arguments and attributes,
    text.
    """
    try:
        text = str(error)
    except Exception:  # from the program's own __str__
        text = ""
    args = [message for arg in error.args for message in _plain(arg)]
    attributes = {str(name): message for name, value in vars(error).items() for message in _plain(value)}
    base = builtin_base(type(error)).__name__
    return [type(error).__name__, base, args if len(args) == len(error.args) else [text], attributes, text]


def decode_error(kind: type[Exception], args: list[Any], attributes: dict[str, Any]) -> Exception:
    """Decodes an exception as an instance of `kind`."""
    args = [decode(arg, _refuse) for arg in args]
    try:
        error = kind(*args)
    except TypeError:  # UnicodeDecodeError, for one, requires exactly its five arguments
        error = kind.__new__(kind)
        error.args = tuple(args)
    vars(error).update({name: decode(value, _refuse) for name, value in attributes.items()})
    return error


def _plain(value: Any) -> list[Any]:
    """Encodes a value into a one-element list; the list is empty if the value is not plain data."""
    try:
        return [encode(value, _refuse)]
    except Exception:
        return []


def _refuse(*_: Any) -> Any:
    raise TypeError("not plain data")
