"""What a worker and the process that started it say to each other, and the socket that they say it through.

Only references, data and plain results cross. What is said for every call stands in lists, for many calls at once: a
function may take no longer for a row than an object takes to cross. The worker imports this, so it imports next to
nothing.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import Any, NamedTuple

from rloo_pipeline.scoring.calls import Scores, Signature


class Start(NamedTuple):
    """What a worker is for."""

    function: str
    options: dict[str, Any]
    parent: int


class Ready(NamedTuple):
    """The function is loaded."""

    signature: Signature


class Broken(NamedTuple):
    """The function cannot be loaded."""

    message: str


class Work(NamedTuple):
    """Calls to make: one after the other, or those of an async function `at_once` at a time.

    They have consecutive numbers, from `number` on, and neighbouring rows of the table, from `first` on.
    """

    number: int
    first: int
    counts: list[int]
    """Rows of each call."""
    deadlines: list[float]
    """Seconds for each call. An async call stops itself there; any other one is killed from outside."""
    columns: dict[str, list[Any]]
    """Arguments, with the rows of all calls."""
    facts: dict[str, Any]
    """Arguments that are the same for all rows; options win."""
    at_once: int


class Began(NamedTuple):
    """An async call is under way."""

    number: int


class Done(NamedTuple):
    """Calls that gave scores, in lists of equal length."""

    numbers: list[int]
    seconds: list[float]
    scores: list[Scores]
    notes: dict[int, str]
    """Why rows of the table have no score, where the function said so (`calls.unscored`)."""


class Failed(NamedTuple):
    """A call that gave no scores; one of three things went wrong."""

    number: int
    seconds: float
    raised: str | None = None
    """What the function did, to be read after its name: raised an exception, ended its process."""
    bad: str | None = None
    """What is wrong with the output, or with what the function was told: no other row can do better."""
    late: bool = False
    """An async call was over its deadline."""
    traceback: str = ""


Message = Ready | Broken | Began | Done | Failed


class Line:
    """One end of a socket, for whole messages: their length in bytes, then their pickle."""

    LENGTH = struct.Struct("=Q")

    def __init__(self, file: int) -> None:
        self.file = file

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self.file

    def send(self, message: object) -> None:
        """Sends a message; waits while the other end does not read."""
        said = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        left = memoryview(self.LENGTH.pack(len(said)) + said)
        while left:
            left = left[os.write(self.file, left) :]

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            EOFError: the other end is closed.
        """
        (length,) = self.LENGTH.unpack(self._read(self.LENGTH.size))
        return pickle.loads(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, have = memoryview(data), 0
        while have < length:
            got = os.readv(self.file, [view[have:]])
            if not got:
                raise EOFError
            have += got
        return data

    def close(self) -> None:
        """Closes this end; once is enough."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def lay(desk: int, work: Work) -> int:
    """Lays work into a file in memory; how long it is there."""
    data = pickle.dumps(work, pickle.HIGHEST_PROTOCOL)
    left, place = memoryview(data), 0
    while left:
        written = os.pwrite(desk, left, place)
        left, place = left[written:], place + written
    return len(data)


def pick_up(desk: int, length: int) -> Work:
    """The work that lies in a file in memory."""
    with mmap.mmap(desk, length, prot=mmap.PROT_READ) as data:
        work: Work = pickle.loads(data)
    return work
