"""Messages between a worker process and its parent, and the connection that carries them. Episodes use it too.

Messages carry only import strings, data and plain results. One message covers many calls, in parallel lists, because
scoring a row may take less time than encoding an object. The worker imports this module, so it imports almost nothing.

A reward function runs in the worker's process, so it can send the parent anything, or half a message, or stop reading.
The parent therefore accepts only JSON, up to a size limit, and never waits for the rest of a message. It sends its
requests, which are pickles, in sealed in-memory files: the socket's buffer is small, and the parent would block until
the worker reads.
"""

import fcntl
import functools
import json
import os
import pickle
import select
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from socket import recv_fds, send_fds, socket, socketpair  # user code may replace them in the module
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
NO_MESSAGE = "wrote to a file descriptor that belongs to the process that calls it"
"""How user code broke its connection, in words that follow the name of a function."""
CLOSED = "closed a file descriptor that belongs to the process that calls it"
LENGTH = struct.Struct("=Q")
"""The length of a message, sent before it."""
READ_SECONDS = 1.0
"""Maximum time that the parent spends reading from one worker."""


class BadMessageError(Exception):
    """A worker sent an invalid message, because its function wrote to the worker's file descriptor."""


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

    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


class ParentConnection:
    """The connection of a process that runs user code to its parent, which it trusts."""

    def __init__(self, file: int) -> None:
        self._socket = socket(fileno=file)
        self._socket.set_inheritable(False)
        self._socket.setblocking(True)  # user code may have set another default

    def receive(self) -> Any:
        """Waits for the next request.

        Raises:
            EOFError: the parent has closed its end.
        """
        data, files, _, _ = recv_fds(self._socket, 1, 1)
        if not data:
            raise EOFError
        with open(files[0], "rb") as file:
            file.seek(0)
            return pickle.load(file)

    def send(self, messages: Sequence[NamedTuple]) -> None:
        """Sends messages; blocks until the parent reads."""
        report = encode_report(messages)
        self._socket.sendall(LENGTH.pack(len(report)) + report)


class UserCodeProcess:
    """A process that runs user code at the other end of a socket. It may close the socket or write anything to it."""

    def __init__(self) -> None:
        self._socket, self.other_end = socketpair()
        self.file = self._socket.fileno()
        self.fault: str | None = None
        """How the connection broke: NO_MESSAGE or CLOSED; None while it works."""
        self.unread = bytearray()
        """Bytes that have arrived and are not a whole message yet."""

    def ask(self, request: NamedTuple) -> None:
        """Sends a request without waiting until it is read. The process cannot change or enlarge the file with it."""
        with os.fdopen(os.memfd_create("request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
            pickle.dump(request, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            with suppress(BrokenPipeError, ConnectionResetError):  # the process died; the pool will notice
                send_fds(self._socket, [b"\0"], [file.fileno()])

    def close(self) -> None:
        """Closes this end; a second call does nothing."""
        self._socket.close()

    def read(self, limit: int, kinds: Mapping[str, type], record: Callable[[Any], object]) -> None:
        """Reads the messages that have arrived, without waiting for more, unless the connection is broken.

        Args:
            limit: maximum size of a message in bytes.
            kinds: types of messages by name.
            record: called with each message; raises BadMessageError for one that is impossible at this point.
        """
        end = time.monotonic() + READ_SECONDS
        poll = select.poll()
        poll.register(self.file, select.POLLIN)
        try:
            while not self.fault and poll.poll(0) and time.monotonic() < end:
                data = b""
                with suppress(ConnectionResetError):
                    data = os.read(self.file, 1 << 18)
                if not data:
                    self.fault = CLOSED
                self.unread += data
                for report in self._complete(limit):
                    for message in decode_report(report, kinds):
                        record(message)
        except BadMessageError:
            self.fault = NO_MESSAGE

    def _complete(self, limit: int) -> Iterator[bytearray]:
        """Takes complete messages out of the buffer."""
        size = LENGTH.size
        while len(self.unread) >= size:
            end = size + LENGTH.unpack_from(self.unread)[0]
            if end > size + limit:
                raise BadMessageError
            if len(self.unread) < end:
                return
            message = self.unread[size:end]
            del self.unread[:end]
            yield message
