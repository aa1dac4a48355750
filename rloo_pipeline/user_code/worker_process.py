"""A worker process as its parent sees it: start it, send it calls, read its messages, kill it with its children.

Workers are plain subprocesses in sessions of their own. `multiprocessing` would import the caller's main module again,
or fork a process that may hold a GPU and threads. concurrent.futures cannot kill a call at all; Pebble kills a worker,
but not the processes that the worker started.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rloo_pipeline.runtime import process_end
from rloo_pipeline.user_code.messages import (
    CLOSED,
    KINDS,
    BadMessageError,
    Began,
    CallBatch,
    Done,
    Failed,
    Message,
    Ready,
    Start,
    TimedCall,
    UserCodeProcess,
)
from rloo_pipeline.user_code.reward_call import Signature
from rloo_pipeline.user_code.worker import StatusBoard, main

BOOT = "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; from {} import main; main(*{})"
"""Code of a new process: its arguments are this process's sys.path."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
"""The hash seed is the same in every worker, so sets of strings have one order and scores do not depend on the number
of workers.
"""
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME")
"""Environment variables that are not passed to another Python."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PR_SET_CHILD_SUBREAPER = 36
"""Linux, prctl(2): descendants whose parent dies become children of this process."""
MARK = "RLOO_SCORED_BY"
"""Variable in the environment of workers and of all that they start: the process that scores."""
GRACE = 2.0
"""Seconds after its deadline in which an async call may stop itself, unless it blocks the event loop."""
MESSAGE_BYTES, CALL_BYTES, ROW_BYTES = 1 << 20, 1 << 18, 1 << 13
"""Maximum size of a message in bytes: a base, plus more for each call (a traceback) and row (a reason) in it."""
EXIT_SECONDS = 5.0
"""Seconds in which a dismissed worker may exit by itself."""


class WorkerProcess(UserCodeProcess):
    """One process that calls one reward function."""

    def __init__(self, function: str, options: dict[str, Any], threads: int) -> None:
        parent_end, worker_end = socket.socketpair()
        super().__init__(parent_end.detach())
        self.batch_file = os.fdopen(os.memfd_create("batch"), "wb")
        board_file = os.memfd_create("board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(board_file, StatusBoard.FORM.size)
        fcntl.fcntl(board_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # reading memory that was cut kills a process
        self.board = StatusBoard(board_file)
        files = worker_end.fileno(), self.batch_file.fileno(), board_file
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(main.__module__, files), *sys.path],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what functions print belongs to the log or the terminal, not to a command's output
            start_new_session=True,
            env=os.environ | ENVIRONMENT | {MARK: str(os.getpid())} | dict.fromkeys(THREADS, str(threads)),
        )
        worker_end.close()
        os.close(board_file)
        self.signature: Signature | None = None
        """The function's parameters; None until the function is loaded."""
        self.calls: dict[int, TimedCall] = {}
        """Calls that were sent and not answered yet, in order, by number."""
        self._began: dict[int, float] = {}
        """Start of each async call under way."""
        self._limit, self._start, self._end = MESSAGE_BYTES, 0.0, float("inf")
        self.since = time.monotonic()
        self._send(pickle.dumps(Start(function, options, os.getpid())))

    @property
    def idle(self) -> bool:
        """True if the worker waits for calls."""
        return self.signature is not None and not self.calls

    def assign(self, batch: CallBatch) -> None:
        """Sends calls to an idle worker.

        They go through a file in memory: a socket's buffer is small, so the sender would block until the worker reads.
        """
        self.calls = dict(batch.calls)
        self._limit = MESSAGE_BYTES + sum(CALL_BYTES + ROW_BYTES * len(call.rows) for call in self.calls.values())
        self._start = time.monotonic()
        self._end = self._start + sum(call.seconds for call in self.calls.values()) + GRACE
        self.batch_file.seek(0)
        pickle.dump(batch, self.batch_file, pickle.HIGHEST_PROTOCOL)
        self.batch_file.flush()
        self.board.write(0, 0.0)  # it may have a call of another table, with a number that comes again
        self._send(b"")

    def began(self) -> dict[int, float]:
        """The start of each call under way, by number."""
        if self.signature is None or self.signature.asynchronous:
            return self._began
        number, began = self.board.read()  # to which the function can write too
        return {number: min(time.monotonic(), max(self._start, began))} if number in self.calls else {}

    def _send(self, data: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker died; messages() will report it
            self.channel.send(data)

    def messages(self) -> list[Message] | None:
        """New messages of the worker; None when it is dead or its connection disturbed (`fault`)."""
        messages: list[Message] = []
        ended = self.process.poll() is not None  # before reading: messages of a dead worker are still to be read
        self.read(self._limit, KINDS, lambda message: messages.append(self._recorded(message)))
        if self.fault is CLOSED and self._has_exited():
            ended, self.fault = True, None
        return None if (ended or self.fault) and not messages else messages

    def _has_exited(self) -> bool:
        """True if the process ends, after its end of the connection was closed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        return self.process.returncode is not None

    def _recorded(self, message: Message) -> Message:
        """Raises BadMessageError where a message is not about the calls that this worker has."""
        if isinstance(message, Ready):
            self.signature = message.signature
        elif isinstance(message, Began):
            if message.number not in self.calls:
                raise BadMessageError
            self._began[message.number] = time.monotonic()
        elif isinstance(message, Done | Failed):
            numbers = message.numbers if isinstance(message, Done) else [message.number]
            if not self.calls.keys() >= {*numbers} or len({*numbers}) < len(numbers):
                raise BadMessageError
            if isinstance(message, Done):
                self._check(message)
            for number in numbers:
                del self.calls[number]
                self._began.pop(number, None)
        return message

    def _check(self, done: Done) -> None:
        rows = [self.calls[number].rows for number in done.numbers]
        fits = len(done.seconds) == len(rows) and [*map(len, done.scores)] == [*map(len, rows)]
        if not (fits and all(any(row in part for part in rows) for row in done.notes)):
            raise BadMessageError

    @property
    def disturbed(self) -> bool:
        """True if the function wrote to the connection or closed it, so that results may have been lost."""
        return self.fault is not None or self.channel.in_message

    def next_end(self) -> float:
        """Next deadline of a call, on the monotonic clock."""
        ends = (began + self.calls[number].seconds for number, began in self.began().items())
        last = self._end if self.calls else float("inf")
        return min([last, *ends]) + (GRACE if self.signature and self.signature.asynchronous else 0.0)

    def kill(self) -> int:
        """Kills the process and its process group. Returns the exit code."""
        self._close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        exit_code = self.process.wait()
        with suppress(ChildProcessError):  # until none is left of its group, which this process has adopted
            while True:
                os.waitpid(-self.process.pid, 0)
        return exit_code

    def dismiss(self) -> None:
        """Tells a worker without further calls to exit; kills one that still imports its function."""
        if self.signature is None:
            self.kill()
        self._close()

    def _close(self) -> None:
        self.channel.close()
        self.batch_file.close()

    def end(self) -> None:
        """Waits for a dismissed worker, then kills the rest of its process group."""
        if self.process.poll() is None:
            end = process_end.readable_after(self.process.pid)  # Popen.wait with a timeout polls with sleeps
            wait([end], EXIT_SECONDS)
            os.close(end)
        self.kill()


def adopt_orphans() -> frozenset[int]:
    """Makes this process the parent of processes that its workers leave behind. Returns its present children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return frozenset(_children())


def end_orphans(others: frozenset[int]) -> None:
    """Kills orphans: processes that dead workers left behind and this process adopted, and their own children.

    An orphan has our mark in its environment, or belongs to another session than this process.

    Args:
        others: child processes that this process had when it called `adopt_orphans`; they stay alive.
    """
    mark = f"{MARK}={os.getpid()}".encode()
    while orphans := [
        child
        for child, (session, environment) in _children().items()
        if child not in others and (session != os.getsid(0) or mark in environment.split(b"\0"))
    ]:
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> dict[int, tuple[int, bytes]]:
    """The session and environment of each child of this process."""
    children = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            parent, _, session = file.read_text().rpartition(") ")[2].split()[1:4]
            if int(parent) == os.getpid():
                children[int(file.parent.name)] = int(session), (file.parent / "environ").read_bytes()
    return children


def describe_exit(code: int) -> str:
    """Describes a worker's exit code, phrased to follow the function's name."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
