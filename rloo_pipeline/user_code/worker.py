"""The worker process: loads a reward function by its import string and calls it on the main thread.

`worker_process.WorkerProcess` starts it with two file descriptors:

- a socket: `Start` comes in, `Ready` or `Broken` goes out. Then each `CallBatch` comes in, and results go out as JSON,
  with several short calls per message. At the end of the stream the process exits. `Rest` ends a stage's calls; the
  process then writes to the log of the stage whose calls come next.
- an in-memory file, the `StatusBoard`, with the current call, which the parent reads when a call hangs.

Only import strings, data and plain results are sent, so functions need not be picklable. Functions run on the main
thread, so libraries that use SIGALRM work. The process dies with its parent.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import inspect
import mmap
import os
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline import import_string
from rloo_pipeline.errors import UserError, explain, one_line
from rloo_pipeline.user_code import reward_call
from rloo_pipeline.user_code.messages import (
    TRACEBACK_CHARACTERS,
    Began,
    Broken,
    CallBatch,
    Done,
    Failed,
    Message,
    ParentConnection,
    Ready,
    Rest,
    Rested,
    Start,
)

if TYPE_CHECKING:
    import asyncio

PR_SET_PDEATHSIG = 1
"""prctl(2) option for the signal that a process gets when its parent dies."""

REPORT_SECONDS = 0.05
"""Results are sent at least this often while calls are finishing."""


class StatusBoard:
    """Number and start time of the current call, in shared memory. Processes share the clock time.monotonic."""

    FORM = struct.Struct("=qd")

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, self.FORM.size)

    def write(self, number: int, began: float) -> None:
        """Records that a call begins."""
        self.FORM.pack_into(self.memory, 0, number, began)

    def read(self) -> tuple[int, float]:
        """Number and start time of the current call; the number is 0 before the first call."""
        number, began = self.FORM.unpack_from(self.memory)
        return number, began


class Call(NamedTuple):
    """One call of the function."""

    number: int
    rows: range
    arguments: dict[str, Any]
    deadline: float


def main(socket: int, board_file: int) -> None:
    """Runs a worker.

    Args:
        socket: file descriptor of the worker's end of the socket.
        board_file: file descriptor of the status board.
    """
    os.set_inheritable(board_file, False)
    parent = ParentConnection(socket)
    start: Start = parent.receive()
    die_with(start.parent)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent closed its end
        _serve(parent, StatusBoard(board_file), start)


def _serve(parent: ParentConnection, board: StatusBoard, start: Start) -> None:
    try:
        function = import_string.load(start.function)
        signature = reward_call.signature_of(function)
    except (UserError, ValueError, TypeError, OSError) as error:
        parent.send([Broken(explain(error) if isinstance(error, OSError) else str(error))])
        return
    parent.send([Ready(signature)])
    gc.collect()
    gc.freeze()  # loaded modules stay, so the garbage collector need not scan them again
    scorer = _Scorer(function, start, parent, board)
    while True:
        batch = _next_batch(parent)
        constants = {name: value for name, value in batch.constants.items() if name in signature.named}
        calls = _calls(batch, constants | start.options)
        if signature.asynchronous:
            scorer.loop.run(scorer.call_concurrently(list(calls), batch.at_once))
        else:
            scorer.call_in_turn(calls)


def _next_batch(parent: ParentConnection) -> CallBatch:
    """Waits for calls. Between two stages, this process holds no GPU memory except its CUDA context."""
    request: CallBatch | Rest = parent.receive()
    while isinstance(request, Rest):
        from rloo_pipeline.runtime import devices, output

        devices.free_gpu()
        parent.send([Rested()])
        request = parent.receive()
        output.write_as_parent()
    return request


def _calls(batch: CallBatch, constants: dict[str, Any]) -> Iterator[Call]:
    columns = [(name, _unshared(values)) for name, values in batch.columns.items()]
    mutable = [name for name, value in constants.items() if isinstance(value, list | dict)]
    end = 0
    for number, (rows, deadline) in batch.calls.items():
        first, end = end, end + len(rows)
        arguments = {name: values[first:end] for name, values in columns}
        # copied, because a function may change its arguments, and the next call must not see that
        own = {name: copy.deepcopy(constants[name]) for name in mutable}
        yield Call(number, rows, arguments | constants | own, deadline)


def _unshared(values: list[Any]) -> list[Any]:
    """Copies lists and dicts that rows share (as the rows of a prompt do), because a function may change them."""
    own: list[Any] = []
    seen: set[int] = set()
    for value in values:
        own.append(_copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return own


def _copy(value: Any) -> Any:
    """Copies nested lists and dicts, but not images."""
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, since a worker in an endless loop would not notice."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def only_in(process: int) -> Iterator[None]:
    """If a user function forks and returns in both processes, ends the child, so that only the process with this id
    continues.
    """
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)


class CallerOfUserCode:
    """Calls user functions in this process."""

    def __init__(self, reference: str = "") -> None:
        self.pid, self.reference = os.getpid(), reference

    def raised(self, error: BaseException) -> str:
        """Describes an exception of the function or its class, in words that follow its name."""
        message = one_line(f"raised {type(error).__name__}: {one_line(error, 500)}", 500)
        return message + import_string.error_location(error, self.reference)

    @cached_property
    def loop(self) -> asyncio.Runner:
        """One event loop for all calls, because clients of services are bound to the loop in which they were
        created.
        """
        import asyncio

        return asyncio.Runner()


class _Scorer(CallerOfUserCode):
    """Makes the calls of one reward function and sends their results."""

    def __init__(
        self, function: Callable[..., Any], start: Start, parent: ParentConnection, board: StatusBoard
    ) -> None:
        super().__init__(start.function)
        self.function, self.parent, self.board = function, parent, board

    def call_in_turn(self, calls: Iterator[Call]) -> None:
        """Makes one call after another on this thread."""
        results: list[Message] = []
        last_report = time.monotonic()
        for call in calls:
            began = time.monotonic()
            if results and began - last_report > REPORT_SECONDS:
                self._send(results)
                results, last_report = [], began
            self.board.write(call.number, began)
            try:
                notes = reward_call.collect_notes()
                with only_in(self.pid):
                    returned = self.function(**call.arguments)
                    if type(returned) is not list and inspect.isawaitable(returned):
                        returned = self.loop.run(_await(returned), context=copy_context())  # with this call's own notes
                scores = reward_call.checked_scores(returned, call.rows, notes)
                _add(results, call, time.monotonic() - began, scores, notes)
            except BaseException as error:  # also SystemExit and asyncio.CancelledError
                results.append(self._failed(call, began, error))
        self._send(results)

    async def call_concurrently(self, calls: list[Call], at_once: int) -> None:
        """Makes async calls in one loop, at most `at_once` at a time, each with its own deadline."""
        import asyncio

        free = asyncio.Semaphore(at_once)

        async def limited(call: Call) -> None:
            async with free:
                self._send([Began(call.number)])
                self._send([await self._call_async(call)])

        await asyncio.gather(*(limited(call) for call in calls))

    async def _call_async(self, call: Call) -> Done | Failed:
        import asyncio

        began = time.monotonic()
        limit = asyncio.timeout(call.deadline)
        try:
            notes = reward_call.collect_notes()  # each call is a task with its own context
            async with limit:
                with only_in(self.pid):
                    returned = await self.function(**call.arguments)
            scores = reward_call.checked_scores(returned, call.rows, notes)
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return Failed(call.number, time.monotonic() - began, late=True)
            return self._failed(call, began, error)
        return _add([], call, time.monotonic() - began, scores, notes)

    def _send(self, messages: list[Message]) -> None:
        try:
            self.parent.send(messages)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.ENOTSOCK):  # a call closed the socket; which one does not matter
                self.board.write(0, 0.0)
            raise

    def _failed(self, call: Call, began: float, error: BaseException) -> Failed:
        seconds = time.monotonic() - began
        while isinstance(error, ExceptionGroup):  # from an asyncio.TaskGroup, whose first failure cancels the rest
            error = error.exceptions[0]
        if isinstance(error, reward_call.BadOutputError):
            return Failed(call.number, seconds, bad=str(error))
        if isinstance(error, UserError):
            rows = reward_call.rows_text(call.rows)
            return Failed(call.number, seconds, bad=f"cannot continue with {rows}: {error}")
        text = "".join(traceback.format_exception(error))
        return Failed(call.number, seconds, raised=self.raised(error), traceback=text[-TRACEBACK_CHARACTERS:])


def _add(results: list[Message], call: Call, seconds: float, scores: reward_call.Scores, notes: dict[int, str]) -> Done:
    """Adds a call with scores to the last message of `results`, or to a new one; returns that message."""
    if not results or not isinstance(results[-1], Done):
        results.append(Done([], [], [], {}))
    done = results[-1]
    assert isinstance(done, Done)
    done.numbers.append(call.number)
    done.seconds.append(seconds)
    done.scores.append(scores)
    done.notes.update((call.rows[index], note) for index, note in notes.items())
    return done


async def _await(awaitable: Any) -> Any:
    return await awaitable
