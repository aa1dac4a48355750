"""A worker process: loads one reward function by its reference and calls it, always on the main thread.

It is started by `pool.Worker` and speaks through one socket in pickles: `Start` in, `Ready` (or `Broken`) out; then
`Work` in, a `Done` for each call out, several at a time where calls are short; at the end of the stream it leaves. Only
references, data and plain results cross, so a function need not be picklable, and libraries that use SIGALRM work. The
call that it is at stands on a board in shared memory, where it can be read when it hangs. It dies with the process that
started it.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import signal
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline import references
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.calls import BadOutputError, Scores, Signature, checked, signature_of

if TYPE_CHECKING:
    import asyncio

PR_SET_PDEATHSIG = 1
"""Linux, prctl(2): the signal that a process gets when its parent dies."""

TELL_SECONDS = 0.05
"""What is done is told at least so often, as long as calls end."""


class Board:
    """The number of the call that a worker is at and when it began (time.monotonic, the same clock everywhere)."""

    FORM = struct.Struct("=qd")

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, self.FORM.size)

    def write(self, number: int, began: float) -> None:
        """Notes that a call begins."""
        self.FORM.pack_into(self.memory, 0, number, began)

    def read(self) -> tuple[int, float]:
        """The call and its beginning; 0 before the first."""
        number, began = self.FORM.unpack_from(self.memory)
        return number, began


class Start(NamedTuple):
    """What a worker is for."""

    function: str
    options: dict[str, Any]
    facts: dict[str, Any]
    """Arguments that hold for all rows, for a function that names them; options win."""
    parent: int


class Ready(NamedTuple):
    """The function is loaded."""

    signature: Signature


class Broken(NamedTuple):
    """The function cannot be loaded."""

    message: str


class Call(NamedTuple):
    """Some rows to score at once."""

    number: int
    rows: tuple[int, ...]
    arguments: dict[str, list[Any]]
    deadline: float
    """Seconds. An async call stops itself there; any other one is killed from outside."""


class Work(NamedTuple):
    """Calls to make: one after the other, or those of an async function `at_once` at a time."""

    calls: list[Call]
    at_once: int


class Began(NamedTuple):
    """An async call is under way."""

    number: int


class Done(NamedTuple):
    """A call is over: it gave scores, or one of three things went wrong."""

    number: int
    seconds: float
    scores: Scores | None = None
    raised: str | None = None
    """What the function did, to be read after its name: raised an exception, ended its process."""
    bad: str | None = None
    """What is wrong with the output, or with what the function was told: no other row can do better."""
    late: bool = False
    """An async call was over its deadline."""
    traceback: str = ""


def main(socket: int, board: int) -> None:
    """The life of a worker, given the file descriptors of its socket and of its board."""
    os.set_inheritable(socket, False)
    os.set_inheritable(board, False)
    connection = Connection(socket)
    start: Start = connection.recv()
    _die_with(start.parent)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other end wants no more
        _serve(connection, Board(board), start)


def _serve(connection: Connection, board: Board, start: Start) -> None:
    try:
        function = references.load(start.function)
        signature = signature_of(function)
    except (UserError, ValueError, TypeError) as error:
        connection.send([Broken(str(error))])
        return
    connection.send([Ready(signature)])
    facts = {name: value for name, value in start.facts.items() if name in signature.named}
    make = _Calls(function, facts | start.options, connection, board)
    while True:
        work: Work = connection.recv()
        if signature.asynchronous:
            make.loop.run(make.beside_each_other(work))
        else:
            make.in_turn(work.calls)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens: a worker in an endless loop would
    never notice by itself.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Calls:
    """Calls of one function."""

    def __init__(
        self, function: Callable[..., Any], options: dict[str, Any], connection: Connection, board: Board
    ) -> None:
        self.function, self.options, self.connection, self.board = function, options, connection, board

    @cached_property
    def loop(self) -> asyncio.Runner:
        """One event loop for all calls, since clients of services hold on to theirs."""
        import asyncio

        return asyncio.Runner()

    def in_turn(self, calls: list[Call]) -> None:
        """One call after the other, on this thread."""
        done: list[Done] = []
        told = time.monotonic()
        for call in calls:
            began = time.monotonic()
            if done and began - told > TELL_SECONDS:
                self.connection.send(done)
                done, told = [], began
            self.board.write(call.number, began)
            done.append(self._one(call, began))
        self.connection.send(done)

    def _one(self, call: Call, began: float) -> Done:
        try:
            given = self.function(**call.arguments | self.options)
            if inspect.isawaitable(given):
                given = self.loop.run(_await(given))
            return Done(call.number, time.monotonic() - began, checked(given, call.rows))
        except Exception as error:
            return _failed(call, began, error)

    async def beside_each_other(self, work: Work) -> None:
        """Async calls in one loop, each with its own deadline."""
        import asyncio

        free = asyncio.Semaphore(work.at_once)

        async def one(call: Call) -> None:
            async with free:
                self.connection.send([Began(call.number)])
                self.connection.send([await self._one_async(call)])

        await asyncio.gather(*(one(call) for call in work.calls))

    async def _one_async(self, call: Call) -> Done:
        import asyncio

        began = time.monotonic()
        limit = asyncio.timeout(call.deadline)
        try:
            async with limit:
                given = await self.function(**call.arguments | self.options)
            return Done(call.number, time.monotonic() - began, checked(given, call.rows))
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return Done(call.number, time.monotonic() - began, late=True)
            return _failed(call, began, error)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _failed(call: Call, began: float, error: Exception) -> Done:
    seconds = time.monotonic() - began
    if isinstance(error, BadOutputError):
        return Done(call.number, seconds, bad=str(error))
    if isinstance(error, UserError):
        return Done(call.number, seconds, bad=f"cannot go on: {error}")
    said = " ".join(f"raised {type(error).__name__}: {error}".split())[:500]
    return Done(call.number, seconds, raised=said, traceback="".join(traceback.format_exception(error)))
