"""Messages between a process that runs user code and its parent; here are those of reward functions.

Messages carry only import strings, data and plain results. One message covers many calls, in parallel lists, because
scoring a row may take less time than encoding an object. The worker imports this module, so it imports almost nothing.
"""

import functools
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from socket import recv_fds, socket  # user code may replace them in the module
from typing import Any, NamedTuple

from rloo_pipeline.user_code.reward_call import Scores, Signature


class Start(NamedTuple):
    """Parent to worker: the function to load."""

    function: str
    options: dict[str, Any]
    parent: int
    """Process id of the parent."""


class Ready(NamedTuple):
    """Worker to parent: the function is loaded."""

    signature: Signature


class Broken(NamedTuple):
    """Worker to parent: the function cannot be loaded."""

    message: str


class TimedCall(NamedTuple):
    """The rows of a call, and its time limit."""

    rows: range
    """Rows of the table."""
    seconds: float
    """Time limit. An async call stops itself at its limit; for other calls, the parent kills the worker."""


class CallBatch(NamedTuple):
    """Parent to worker: calls to make, one after another, or `at_once` at a time for an async function."""

    calls: dict[int, TimedCall]
    """Calls by number, in order."""
    columns: dict[str, list[Any]]
    """Arguments with one entry per row, for the rows of all calls."""
    constants: dict[str, Any]
    """Arguments that are the same for all rows; options override them."""
    at_once: int


class Rest(NamedTuple):
    """Parent to worker: free the GPU. The next calls may be another stage's."""


class Rested(NamedTuple):
    """Worker to parent: the GPU is free."""


class Began(NamedTuple):
    """Worker to parent: an async call has begun."""

    number: int


class Done(NamedTuple):
    """Worker to parent: calls that returned scores, as lists of equal length."""

    numbers: list[int]
    seconds: list[float]
    scores: list[Scores]
    notes: dict[int, str]
    """Why rows of the table have no score, as reported by `reward_call.unscored`."""


class Failed(NamedTuple):
    """Worker to parent: a call without scores, for one of three reasons: `raised`, `bad` or `late`."""

    number: int
    seconds: float
    raised: str | None = None
    """The failure (an exception or the end of the process), in words that follow the function's name."""
    bad: str | None = None
    """The problem with invalid output, or a UserError: retrying row by row cannot help."""
    late: bool = False
    """True if an async call exceeded its deadline."""
    traceback: str = ""


Message = Ready | Broken | Began | Done | Failed | Rested
KINDS = {kind.__name__: kind for kind in (Ready, Broken, Began, Done, Failed, Rested)}
"""Messages that a worker sends, by name."""
TRACEBACK_CHARACTERS = 20_000
"""Number of characters that are sent of a traceback, counted from its end."""
LENGTH = struct.Struct("=Q")
"""The length of a message, sent before it."""


class BadMessageError(Exception):
    """A process sent an invalid message, because user code wrote to its file descriptor."""


def encode_report(messages: Sequence[NamedTuple]) -> bytes:
    """Encodes a worker's messages as JSON."""
    return json.dumps([[type(message).__name__, message] for message in messages]).encode()


def decode_report(data: bytes | bytearray, kinds: Mapping[str, type] = KINDS) -> list[Any]:
    """Decodes messages.

    Args:
        data: received bytes.
        kinds: types of messages by name.

    Raises:
        BadMessageError: the data is not such messages.
    """
    try:
        report = json.loads(data)
        if not isinstance(report, list):
            raise TypeError
        return [_validator(kinds[name]).validate_python(fields) for name, fields in report]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadMessageError from None


@functools.cache
def _validator(kind: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter  # only in the parent, which has imported it for the configuration

    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validator  # its wrapper takes three times as long


class ParentConnection:
    """The connection of a process that runs user code to its parent, which it trusts."""

    def __init__(self, file: int) -> None:
        self.file, self._socket = file, socket(fileno=file)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)  # user code may have set another default
        self.passed: list[int] = []
        """Files that came with the last request."""

    def receive(self) -> Any:
        """Waits for the next request.

        Raises:
            EOFError: the parent has closed its end.
        """
        data, files, _, _ = recv_fds(self._socket, 1, 2)
        if not data:
            raise EOFError
        self.passed = files[1:]
        with open(files[0], "rb") as file:
            file.seek(0)
            return pickle.load(file)

    def send(self, messages: Sequence[NamedTuple]) -> None:
        """Sends messages; blocks until the parent reads."""
        report = encode_report(messages)
        self._socket.sendall(LENGTH.pack(len(report)) + report)

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()
