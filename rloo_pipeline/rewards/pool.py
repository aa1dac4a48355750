"""Worker processes from outside: started, spoken to, killed with everything that they started.

They are plain subprocesses in sessions of their own, and not `multiprocessing` ones: those import the caller's main
module again, or fork a process that may hold a GPU and threads. concurrent.futures cannot kill a call at all, and
Pebble, which can, kills a worker but not what the worker started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from rloo_pipeline.rewards.calls import Signature
from rloo_pipeline.rewards.worker import Began, Board, Broken, Call, Done, Ready, Start, Work, main

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main({}, {})"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The same in every worker, so that no score depends on which of them, or how many there are: one core is one's share,
and sets of words are walked in one order.
"""
GRACE = 2.0
"""Seconds after its deadline in which an async call may still stop itself."""
LEAVING = 5.0
"""Seconds in which a worker whose work is done may end by itself."""

Message = Ready | Broken | Began | Done


class Worker:
    """One process that calls one reward function."""

    def __init__(self, function: str, options: dict[str, Any], facts: dict[str, Any]) -> None:
        self.connection, inner = Pipe()
        board = os.memfd_create("board")
        os.ftruncate(board, Board.FORM.size)
        self.board = Board(board)
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(main.__module__, inner.fileno(), board), json.dumps(sys.path)],
            pass_fds=[inner.fileno(), board],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what functions print belongs to the log, or to the terminal, not to a command's answer
            start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )
        inner.close()
        os.close(board)
        self.signature: Signature | None = None
        """What the function takes; None until it is loaded."""
        self.calls: dict[int, Call] = {}
        """Handed over and not done, by number, in order."""
        self._began: dict[int, float] = {}
        """When each async call that is under way began."""
        self.since = time.monotonic()
        self._send(Start(function, options, facts, os.getpid()))

    @property
    def idle(self) -> bool:
        """Whether it waits for calls."""
        return self.signature is not None and not self.calls

    def give(self, calls: list[Call], at_once: int) -> None:
        """Hands over calls; only to a worker that has none, since one that does not read would block the sender."""
        self.calls = {call.number: call for call in calls}
        self._send(Work(calls, at_once))

    def began(self) -> dict[int, float]:
        """When each call that is under way began."""
        if self.signature is None or self.signature.asynchronous:
            return self._began
        number, began = self.board.read()
        return {number: began} if number in self.calls else {}

    def _send(self, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; messages() will say so
            self.connection.send(message)

    def messages(self) -> list[Message] | None:
        """What it has said since; None when it is dead and said nothing more."""
        found: list[Message] = []
        ended = self.process.poll() is not None  # asked first: what it said before is still to be read
        try:
            while self.connection.poll():
                found += (self._noted(message) for message in self.connection.recv())
        except (EOFError, ConnectionResetError):
            ended = True
        return None if ended and not found else found

    def _noted(self, message: Message) -> Message:
        if isinstance(message, Ready):
            self.signature = message.signature
        elif isinstance(message, Began):
            self._began[message.number] = time.monotonic()
        elif isinstance(message, Done):
            del self.calls[message.number]
            self._began.pop(message.number, None)
        return message

    def overdue(self, grace: float) -> list[Call]:
        """Calls that are over their deadline by more than `grace` seconds."""
        now = time.monotonic()
        return [self.calls[number] for number, began in self.began().items() if now > self._end(number, began) + grace]

    def _end(self, number: int, began: float) -> float:
        return began + self.calls[number].deadline

    def next_end(self, grace: float) -> float:
        """When the next call will be `grace` seconds over its deadline, on the monotonic clock."""
        return min((self._end(number, began) for number, began in self.began().items()), default=float("inf")) + grace

    def kill(self) -> int:
        """Kills the process and everything in its session's group; the exit code."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def dismiss(self) -> None:
        """Tells a worker whose work is done to end by itself; one that is still at its imports is killed."""
        if self.signature is None:
            self.kill()
        self.connection.close()

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
