"""The parent's handle on a worker process: starts it, sends it calls, reads its messages, kills it with its children.

Workers are plain subprocesses, each in its own session. `multiprocessing` would import the caller's main module again,
or fork a process that may hold a GPU and threads. concurrent.futures cannot kill a call at all. Pebble kills a worker,
but not the processes that the worker started.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import fence
from rloo_pipeline.user_code.messages import (
    KINDS,
    BadMessageError,
    Began,
    Broken,
    CallBatch,
    Done,
    Failed,
    Message,
    Ready,
    Rest,
    Rested,
    Start,
    TimedCall,
)
from rloo_pipeline.user_code.process import (
    CLOSED,
    NO_MESSAGE,
    SpawnedProcess,
    environment_with,
    python_command,
    wait_for,
)
from rloo_pipeline.user_code.reward_call import Signature
from rloo_pipeline.user_code.worker import StatusBoard, main

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward

GRACE = 2.0
"""Seconds after its deadline in which an async call should stop itself; it cannot if it blocks the event loop."""
MESSAGE_BYTES, CALL_BYTES, ROW_BYTES = 1 << 20, 1 << 18, 1 << 13
"""Maximum size of a message in bytes: a base, plus room for a traceback per call and a reason per row."""
REST_SECONDS = 60.0
"""Seconds that a worker has to free its GPU; the first time, it maps and pins host memory for its weights."""


class WorkerProcess(SpawnedProcess):
    """A process that calls one reward function."""

    kinds = KINDS

    def __init__(self, reward: Reward) -> None:
        super().__init__()
        self._identity = _identity(reward)
        board_file = os.memfd_create("board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(board_file, StatusBoard.FORM.size)
        fcntl.fcntl(board_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # reading truncated memory would kill us
        self.board = StatusBoard(board_file)
        command = python_command(main.__module__, self.other_end.fileno(), board_file)
        self.start(command, environment_with(reward.threads), [board_file])
        os.close(board_file)
        self.signature: Signature | None = None
        """The function's parameters; None until the function is loaded."""
        self.calls: dict[int, TimedCall] = {}
        """Calls that were sent and are not answered yet, in order, by number."""
        self.rested: bool | None = None
        """False while the process frees its GPU, True once it has; None while it is in use."""
        self.answered = False
        """True once a call was answered."""
        self._began: dict[int, float] = {}
        """Start of each async call in progress."""
        self.limit, self._end = MESSAGE_BYTES, math.inf
        self.since = time.monotonic()
        """Time at which the worker was started or, later, got its last calls."""
        self.ask(Start(reward.function, reward.options, os.getpid()))

    @property
    def idle(self) -> bool:
        """True if the worker waits for calls."""
        return self.signature is not None and not self.calls

    def assign(self, batch: CallBatch) -> None:
        """Sends calls to an idle worker."""
        self.calls, self.rested = dict(batch.calls), None
        self.limit = MESSAGE_BYTES + sum(CALL_BYTES + ROW_BYTES * len(call.rows) for call in self.calls.values())
        self.since = time.monotonic()
        self._end = self.since + sum(call.seconds for call in self.calls.values()) + GRACE
        self.board.write(0, 0.0)  # it may still show a call for another table, whose number is used again
        self.ask(batch)

    def began(self) -> dict[int, float]:
        """The start of each call in progress, by number."""
        if self.signature is None or self.signature.asynchronous:
            return self._began
        number, began = self.board.read()  # the function can write to it too
        return {number: min(time.monotonic(), max(self.since, began))} if number in self.calls else {}

    def recorded(self, message: Message) -> Message:
        """Checks that a message is about this worker's calls; raises BadMessageError if not."""
        if isinstance(message, Done | Failed):
            numbers = message.numbers if isinstance(message, Done) else [message.number]
            if not self.calls.keys() >= {*numbers} or len({*numbers}) < len(numbers):
                raise BadMessageError
            if isinstance(message, Done):
                self._check(message)
            for number in numbers:
                del self.calls[number]
                self._began.pop(number, None)
            self.answered = True
        elif isinstance(message, Ready):
            self.signature = message.signature
        elif isinstance(message, Rested) and self.rested is False:
            self.rested = True
        elif isinstance(message, Began) and message.number in self.calls:
            self._began[message.number] = time.monotonic()
        elif not isinstance(message, Broken):
            raise BadMessageError
        return message

    def _check(self, done: Done) -> None:
        rows = [self.calls[number].rows for number in done.numbers]
        fits = len(done.seconds) == len(rows) and [*map(len, done.scores)] == [*map(len, rows)]
        if not (fits and all(any(row in part for part in rows) for row in done.notes)):
            raise BadMessageError

    @property
    def disturbed(self) -> bool:
        """True if the function wrote to the connection or closed it, so that results may be lost."""
        return self.lost in (NO_MESSAGE, CLOSED) or bool(self.unread)

    def next_end(self) -> float:
        """The next deadline of a call, on the monotonic clock."""
        ends = (began + self.calls[number].seconds for number, began in self.began().items())
        last = self._end if self.calls else math.inf
        return min([last, *ends]) + (GRACE if self.signature and self.signature.asynchronous else 0.0)

    def fits(self, reward: Reward) -> bool:
        """True if a new process for this function would be equal to this one, which is alive."""
        return self._identity == _identity(reward) and self.process.poll() is None

    def rest(self) -> None:
        """Tells an idle worker to free its GPU; another stage may call its function later."""
        self.rested = False
        self.ask(Rest())

    def has_rested(self, deadline: float) -> bool:
        """Waits until a worker that was told to rest has done so. Returns False if it is in use or has died."""
        while self.rested is False and not self.lost and time.monotonic() < deadline:
            wait_for([self], 0.1)
            self.messages()
        return self.rested is True and not self.fault

    def dismiss(self) -> None:
        """Tells a worker that has no more calls to exit; kills one that is still importing its function."""
        if self.signature is None:
            self.kill()
        self.close()


def _identity(reward: Reward) -> object:
    """Everything that a worker process depends on. Each stage has its own token to write with, which none needs."""
    environment = {name: value for name, value in os.environ.items() if name != fence.VARIABLE}
    return reward.column, reward.function, reward.options, reward.threads, os.getcwd(), environment
