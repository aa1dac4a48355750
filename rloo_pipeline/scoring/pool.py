"""Worker processes from outside: started, spoken to, killed with everything that they started.

They are plain subprocesses in sessions of their own, and not `multiprocessing` ones: those import the caller's main
module again, or fork a process that may hold a GPU and threads. concurrent.futures cannot kill a call at all, and
Pebble, which can, kills a worker but not what the worker started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from rloo_pipeline.scoring.calls import Signature
from rloo_pipeline.scoring.messages import Began, Done, Failed, Line, Message, Ready, Start, Work, lay
from rloo_pipeline.scoring.worker import Board, main

BOOT = "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; from {} import main; main({}, {}, {})"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
"""The same in every worker, so that no score depends on which of them, or how many there are: sets of words are walked
in one order.
"""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
GRACE = 2.0
"""Seconds after its deadline in which an async call may still stop itself."""
LEAVING = 5.0
"""Seconds in which a worker whose work is done may end by itself."""


class Worker:
    """One process that calls one reward function."""

    def __init__(self, function: str, options: dict[str, Any], threads: int) -> None:
        ours, inner = socket.socketpair()
        self.line = Line(ours.detach())
        self.desk = os.memfd_create("desk")
        board = os.memfd_create("board")
        os.ftruncate(board, Board.FORM.size)
        self.board = Board(board)
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(main.__module__, inner.fileno(), self.desk, board), *sys.path],
            pass_fds=[inner.fileno(), self.desk, board],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what functions print belongs to the log, or to the terminal, not to a command's answer
            start_new_session=True,
            env=os.environ | ENVIRONMENT | dict.fromkeys(THREADS, str(threads)),
        )
        inner.close()
        os.close(board)
        self.signature: Signature | None = None
        """What the function takes; None until it is loaded."""
        self.calls: dict[int, float] = {}
        """Handed over and not done: the deadline of each, in seconds, by number, in order."""
        self._began: dict[int, float] = {}
        """When each async call that is under way began."""
        self.since = time.monotonic()
        self._send(Start(function, options, os.getpid()))

    @property
    def idle(self) -> bool:
        """Whether it waits for calls."""
        return self.signature is not None and not self.calls

    def give(self, work: Work) -> None:
        """Hands over calls; only to a worker that has none. They lie in shared memory: a socket would hold but little
        of them, and the sender would wait until the worker reads.
        """
        numbers = range(work.number, work.number + len(work.deadlines))
        self.calls = dict(zip(numbers, work.deadlines, strict=True))
        self._send(lay(self.desk, work))

    def began(self) -> dict[int, float]:
        """When each call that is under way began."""
        if self.signature is None or self.signature.asynchronous:
            return self._began
        number, began = self.board.read()
        return {number: began} if number in self.calls else {}

    def _send(self, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; messages() will say so
            self.line.send(message)

    def messages(self) -> list[Message] | None:
        """What it has said since; None when it is dead and said nothing more."""
        found: list[Message] = []
        ended = self.process.poll() is not None  # asked first: what it said before is still to be read
        try:
            while wait([self.line.file], 0):
                found += (self._noted(message) for message in self.line.receive())
        except (EOFError, ConnectionResetError):
            ended = True
        return None if ended and not found else found

    def _noted(self, message: Message) -> Message:
        if isinstance(message, Ready):
            self.signature = message.signature
        elif isinstance(message, Began):
            self._began[message.number] = time.monotonic()
        elif isinstance(message, Done | Failed):
            for number in message.numbers if isinstance(message, Done) else [message.number]:
                del self.calls[number]
                self._began.pop(number, None)
        return message

    def overdue(self, grace: float) -> bool:
        """Whether a call is over its deadline by more than `grace` seconds."""
        return self.next_end(grace) < time.monotonic()

    def next_end(self, grace: float) -> float:
        """When the next call will be `grace` seconds over its deadline, on the monotonic clock."""
        ends = (began + self.calls[number] for number, began in self.began().items())
        return min(ends, default=float("inf")) + grace

    def kill(self) -> int:
        """Kills the process and everything in its session's group; the exit code."""
        self._close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def dismiss(self) -> None:
        """Tells a worker whose work is done to end by itself; one that is still at its imports is killed."""
        if self.signature is None:
            self.kill()
        self._close()

    def _close(self) -> None:
        self.line.close()
        if self.desk >= 0:
            os.close(self.desk)
            self.desk = -1

    def end(self) -> None:
        """Waits for a dismissed worker, and kills what is left of its group."""
        if self.process.poll() is None:
            end = os.pidfd_open(self.process.pid)  # Popen.wait looks now and then only
            wait([end], LEAVING)
            os.close(end)
        self.kill()


def fate(code: int) -> str:
    """What a dead worker's exit code says of the function, for people."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
