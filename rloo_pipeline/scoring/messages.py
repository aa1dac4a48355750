"""Messages between a worker process and its parent, and the socket and shared memory that carry them.

Only import strings, data and plain results cross. A message covers many calls at once, in parallel lists: scoring a
row may take less time than pickling an object. The worker imports this module, so it imports almost nothing.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from typing import Any, NamedTuple

from rloo_pipeline.scoring.reward_call import Scores, Signature


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


class CallBatch(NamedTuple):
    """Parent to worker: calls to make, one after the other, or `at_once` at a time for an async function.

    Calls have consecutive numbers from `number`, and neighbouring rows of the table from `first`.
    """

    number: int
    first: int
    counts: list[int]
    """Rows of each call."""
    deadlines: list[float]
    """Seconds for each call. An async call stops itself then; a worker with any other call is killed by the parent."""
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
    """How the function failed, phrased to follow its name: raised an exception, ended its process."""
    bad: str | None = None
    """Invalid output or a UserError: no retry row by row can help."""
    late: bool = False
    """An async call exceeded its deadline."""
    traceback: str = ""


Message = Ready | Broken | Began | Done | Failed


class MessageSocket:
    """One end of a socket that carries whole messages: a length in bytes, then a pickle."""

    LENGTH = struct.Struct("=Q")

    def __init__(self, file: int) -> None:
        self.file = file

    def send(self, message: object) -> None:
        """Sends a message; blocks while the other end does not read."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        unsent = memoryview(self.LENGTH.pack(len(data)) + data)
        while unsent:
            unsent = unsent[os.write(self.file, unsent) :]

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            EOFError: the other end is closed.
        """
        (length,) = self.LENGTH.unpack(self._read(self.LENGTH.size))
        return pickle.loads(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, filled = memoryview(data), 0
        while filled < length:
            count = os.readv(self.file, [view[filled:]])
            if not count:
                raise EOFError
            filled += count
        return data

    def close(self) -> None:
        """Closes this end; a second call does nothing."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def write_batch(memory_file: int, batch: CallBatch) -> int:
    """Pickles a batch into a file in memory. Returns its length in bytes."""
    data = pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)
    unwritten, offset = memoryview(data), 0
    while unwritten:
        written = os.pwrite(memory_file, unwritten, offset)
        unwritten, offset = unwritten[written:], offset + written
    return len(data)


def read_batch(memory_file: int, length: int) -> CallBatch:
    """The batch that `write_batch` wrote."""
    with mmap.mmap(memory_file, length, prot=mmap.PROT_READ) as data:
        batch: CallBatch = pickle.loads(data)
    return batch
