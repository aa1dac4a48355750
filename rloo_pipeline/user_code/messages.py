"""Messages between a worker process and its parent, and the socket that carries them; also for episodes.

Only import strings, data and plain results cross. A message covers many calls at once, in parallel lists: scoring a
row may take less time than encoding an object. The worker imports this module, so it imports almost nothing.

A reward function shares its process with the worker, so it can write anything to the parent, or half of something. The
parent therefore reads JSON, up to a limit, and never waits for the rest of a message. Pickles go to the worker only.
"""

from __future__ import annotations

import functools
import json
import os
import select
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """A call, and its time limit."""

    rows: range
    """Rows of the table."""
    seconds: float
    """Time limit, after which an async call stops itself; with other calls, the parent kills the worker."""


class CallBatch(NamedTuple):
    """Parent to worker: calls to make, one after the other, or `at_once` at a time for an async function."""

    calls: dict[int, TimedCall]
    """Calls of neighbouring rows, in order, by number."""
    columns: dict[str, list[Any]]
    """Arguments with one entry per row, for the rows of all calls."""
    constants: dict[str, Any]
    """Arguments that are the same for all rows; options override them."""
    at_once: int


class Began(NamedTuple):
    """Worker to parent: an async call began."""

    number: int


class Done(NamedTuple):
    """Worker to parent: calls that returned scores, in lists of equal length."""

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
    """Description of the failure, phrased to follow the function's name: raised an exception, ended its process."""
    bad: str | None = None
    """Invalid output or a UserError: no retry row by row can help."""
    late: bool = False
    """An async call exceeded its deadline."""
    traceback: str = ""


Message = Ready | Broken | Began | Done | Failed
KINDS = {kind.__name__: kind for kind in (Ready, Broken, Began, Done, Failed)}
"""Messages that a worker sends, by name."""
TRACEBACK_CHARACTERS = 20_000
"""Maximum number of characters that are sent of a traceback, from its end."""
NO_MESSAGE = "wrote to a file descriptor that belongs to the process that calls it"
"""How code disturbed its connection, phrased to follow the name of a function."""
CLOSED = "closed a file descriptor that belongs to the process that calls it"
READ_SECONDS = 1.0
"""Longest time for which the parent reads from one worker without a break."""


class BadMessageError(Exception):
    """A worker sent something other than a message: its function wrote to the worker's descriptor."""


def encode_report(messages: Sequence[NamedTuple]) -> bytes:
    """Messages of a worker as JSON."""
    return json.dumps([[type(message).__name__, message] for message in messages]).encode()


def decode_report(data: bytes | bytearray, kinds: Mapping[str, type] = KINDS) -> list[Any]:
    """The messages that were encoded.

    Args:
        data: received bytes.
        kinds: types of messages by name.

    Raises:
        BadMessageError: the data are not such messages.
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

    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


class MessageSocket:
    """One end of a socket that carries whole messages: a length in bytes, then the data."""

    LENGTH = struct.Struct("=Q")

    def __init__(self, file: int) -> None:
        self.file = file
        self._unread = bytearray()

    def send(self, data: bytes) -> None:
        """Sends a message; blocks while the other end does not read."""
        unsent = memoryview(self.LENGTH.pack(len(data)) + data)
        while unsent:
            unsent = unsent[os.write(self.file, unsent) :]

    def receive(self) -> bytearray:
        """Waits for the next message; for the worker, which trusts its parent.

        Raises:
            EOFError: the other end is closed.
        """
        while True:
            for message in self._complete(1 << 40):
                return message
            self._read()

    def arrived(self, limit: int) -> list[bytearray]:
        """The whole messages that are here, without waiting for more.

        Args:
            limit: most bytes of a message.

        Raises:
            EOFError: the other end is closed, and all messages have been returned.
            BadMessageError: a message is longer than `limit`.
        """
        end, messages = time.monotonic() + READ_SECONDS, list(self._complete(limit))
        poll = select.poll()
        poll.register(self.file, select.POLLIN)
        while poll.poll(0) and time.monotonic() < end:
            try:
                self._read()
            except (EOFError, ConnectionResetError):
                if messages:
                    break
                raise EOFError from None
            messages += self._complete(limit)
        return messages

    @property
    def in_message(self) -> bool:
        """True if the beginning of a message is here and its end is not."""
        return bool(self._unread)

    def _read(self) -> None:
        data = os.read(self.file, 1 << 18)
        if not data:
            raise EOFError
        self._unread += data

    def _complete(self, limit: int) -> Iterator[bytearray]:
        """Removes whole messages from what has been read."""
        size = self.LENGTH.size
        while len(self._unread) >= size:
            end = size + self.LENGTH.unpack_from(self._unread)[0]
            if end > size + limit:
                raise BadMessageError
            if len(self._unread) < end:
                return
            message = self._unread[size:end]
            del self._unread[:end]
            yield message

    def close(self) -> None:
        """Closes this end; a second call does nothing."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class UserCodeProcess:
    """A process that runs user code at the other end of a socket. It may close the socket or write anything to it."""

    def __init__(self, file: int) -> None:
        self.channel = MessageSocket(file)
        self.fault: str | None = None
        """How the connection broke, NO_MESSAGE or CLOSED; None while it works."""

    def read(self, limit: int, kinds: Mapping[str, type], record: Callable[[Any], object]) -> None:
        """Reads the messages that have arrived, unless the connection is broken.

        Args:
            limit: maximum size of a message in bytes.
            kinds: types of messages by name.
            record: called with each message; raises BadMessageError for one that cannot be.
        """
        try:
            for report in () if self.fault else self.channel.arrived(limit):
                for message in decode_report(report, kinds):
                    record(message)
        except BadMessageError:
            self.fault = NO_MESSAGE
        except EOFError:
            self.fault = CLOSED
