"""A worker process: loads one reward function by its reference and calls it, always on the main thread.

It is started by `pool.Worker` and speaks through one socket: `Start` in, `Ready` (or `Broken`) out; then the length
of the `Work` that lies in shared memory in, and out what came of each call, of several at a time where they are short;
at the end of the stream it leaves. Only
references, data and plain results cross, so a function need not be picklable, and libraries that use SIGALRM work. The
call that it is at stands on a board in shared memory, where it can be read when it hangs. It dies with the process that
started it.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.config import import_string
from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring import calls
from rloo_pipeline.scoring.messages import Began, Broken, Done, Failed, Line, Ready, Start, Work, pick_up

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


class Call(NamedTuple):
    """Some rows to score at once."""

    number: int
    rows: range
    arguments: dict[str, Any]
    deadline: float


def main(socket: int, desk: int, board: int) -> None:
    """The life of a worker, given the file descriptors of its socket, of the desk where its work lies, and of its
    board.
    """
    for file in (socket, desk, board):
        os.set_inheritable(file, False)
    line = Line(socket)
    start: Start = line.receive()
    _die_with(start.parent)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other end wants no more
        _serve(line, desk, Board(board), start)


def _serve(line: Line, desk: int, board: Board, start: Start) -> None:
    try:
        function = import_string.load(start.function)
        signature = calls.signature_of(function)
    except (UserError, ValueError, TypeError) as error:
        line.send([Broken(str(error))])
        return
    line.send([Ready(signature)])
    gc.collect()
    gc.freeze()  # what is loaded stays: no need to look through it again and again
    make = _Calls(function, start, line, board)
    while True:
        work = pick_up(desk, line.receive())
        _speak_where(start.parent)
        facts = {name: value for name, value in work.facts.items() if name in signature.named}
        todo = _calls(work, facts | start.options)
        if signature.asynchronous:
            make.loop.run(make.beside_each_other(list(todo), work.at_once))
        else:
            make.in_turn(todo)


def _speak_where(parent: int) -> None:
    """Sends what is printed where the parent's words go, which is another log than before if it started this process
    ahead of the stage.
    """
    with suppress(OSError):
        file = os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)


def _calls(work: Work, constants: dict[str, Any]) -> Iterator[Call]:
    number, place, columns = work.number, 0, list(work.columns.items())
    for count, deadline in zip(work.counts, work.deadlines, strict=True):
        end = place + count
        arguments = {name: values[place:end] for name, values in columns}
        arguments.update(constants)
        yield Call(number, range(work.first + place, work.first + end), arguments, deadline)
        number, place = number + 1, end


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens: a worker in an endless loop would
    never notice by itself.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Calls:
    """Calls of one function."""

    def __init__(self, function: Callable[..., Any], start: Start, line: Line, board: Board) -> None:
        self.function, self.reference, self.line, self.board = function, start.function, line, board

    @cached_property
    def loop(self) -> asyncio.Runner:
        """One event loop for all calls, since clients of services hold on to theirs."""
        import asyncio

        return asyncio.Runner()

    def in_turn(self, todo: Iterator[Call]) -> None:
        """One call after the other, on this thread."""
        said: list[Done | Failed] = []
        told = time.monotonic()
        for call in todo:
            began = time.monotonic()
            if said and began - told > TELL_SECONDS:
                self.line.send(said)
                said, told = [], began
            self.board.write(call.number, began)
            try:
                notes = calls.fresh_notes()
                given = self.function(**call.arguments)
                if type(given) is not list and inspect.isawaitable(given):
                    given = self.loop.run(_await(given))
                scores = calls.checked(given, call.rows)
                _add(said, call, time.monotonic() - began, scores, notes)
            except Exception as error:
                said.append(self._failed(call, began, error))
        self.line.send(said)

    async def beside_each_other(self, todo: list[Call], at_once: int) -> None:
        """Async calls in one loop, each with its own deadline."""
        import asyncio

        free = asyncio.Semaphore(at_once)

        async def one(call: Call) -> None:
            async with free:
                self.line.send([Began(call.number)])
                self.line.send([await self._one_async(call)])

        await asyncio.gather(*(one(call) for call in todo))

    async def _one_async(self, call: Call) -> Done | Failed:
        import asyncio

        began = time.monotonic()
        limit = asyncio.timeout(call.deadline)
        try:
            notes = calls.fresh_notes()  # each call is a task, with a context of its own
            async with limit:
                given = await self.function(**call.arguments)
            scores = calls.checked(given, call.rows)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return Failed(call.number, time.monotonic() - began, late=True)
            return self._failed(call, began, error)
        return _add([], call, time.monotonic() - began, scores, notes)

    def _failed(self, call: Call, began: float, error: Exception) -> Failed:
        import traceback

        seconds = time.monotonic() - began
        if isinstance(error, calls.BadOutputError):
            return Failed(call.number, seconds, bad=str(error))
        if isinstance(error, UserError):
            return Failed(call.number, seconds, bad=f"cannot go on: {error}")
        what = " ".join(f"raised {type(error).__name__}: {error}".split())[:500]
        what += import_string.place(error, self.reference)
        return Failed(call.number, seconds, raised=what, traceback="".join(traceback.format_exception(error)))


def _add(said: list[Done | Failed], call: Call, seconds: float, scores: calls.Scores, notes: dict[int, str]) -> Done:
    """Adds a call that gave scores to what is to be said; the message that it is in."""
    if not said or not isinstance(said[-1], Done):
        said.append(Done([], [], [], {}))
    done = said[-1]
    assert isinstance(done, Done)
    done.numbers.append(call.number)
    done.seconds.append(seconds)
    done.scores.append(scores)
    for place, note in notes.items():
        done.notes[call.rows[place]] = note
    return done


async def _await(awaitable: Any) -> Any:
    return await awaitable
