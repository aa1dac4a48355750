"""The parent's handle on a worker process: starts it, sends it calls, reads its messages, kills it with its children.

Workers are plain subprocesses, each in its own session. `multiprocessing` would import the caller's main module again,
or fork a process that may hold a GPU and threads. concurrent.futures cannot kill a call at all. Pebble kills a worker,
but not the processes that the worker started.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import fence
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
    Rest,
    Rested,
    Start,
    TimedCall,
    UserCodeProcess,
)
from rloo_pipeline.user_code.reward_call import Signature
from rloo_pipeline.user_code.worker import StatusBoard, main

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward

BOOT = "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; from {} import main; main(*{})"
"""Code that a new process runs. Its arguments are this process's sys.path."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
"""Every worker has the same hash seed, so that sets of strings have the same order and scores do not depend on the
number of workers.
"""
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME")
"""Environment variables that are not passed on to another Python."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2) option that makes this process adopt descendants whose parent dies."""
MARK = "RLOO_SCORED_BY"
"""Environment variable that marks workers and everything that they start; its value is the id of the scoring
process.
"""
GRACE = 2.0
"""Seconds after its deadline in which an async call should stop itself; it cannot if it blocks the event loop."""
MESSAGE_BYTES, CALL_BYTES, ROW_BYTES = 1 << 20, 1 << 18, 1 << 13
"""Maximum size of a message in bytes: a base, plus room for a traceback per call and a reason per row."""
EXIT_SECONDS = 5.0
"""Seconds that a dismissed worker has to exit by itself."""
REST_SECONDS = 60.0
"""Seconds that a worker has to free its GPU; the first time, it maps and pins host memory for its weights."""


class WorkerProcess(UserCodeProcess):
    """A process that calls one reward function."""

    def __init__(self, reward: Reward) -> None:
        super().__init__()
        self._identity = _identity(reward)
        board_file = os.memfd_create("board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(board_file, StatusBoard.FORM.size)
        fcntl.fcntl(board_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # reading truncated memory would kill us
        self.board = StatusBoard(board_file)
        files = self.other_end.fileno(), board_file
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(main.__module__, files), *sys.path],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of functions belongs in the log or on the terminal, not in a command's output
            start_new_session=True,
            env=os.environ | ENVIRONMENT | {MARK: str(os.getpid())} | dict.fromkeys(THREADS, str(reward.threads)),
        )
        self.other_end.close()
        os.close(board_file)
        self.signature: Signature | None = None
        """The function's parameters; None until the function is loaded."""
        self.calls: dict[int, TimedCall] = {}
        """Calls that were sent and are not answered yet, in order, by number."""
        self._killed = False
        self.rested: bool | None = None
        """False while the process frees its GPU, True once it has; None while it is in use."""
        self.answered = False
        """True once a call was answered."""
        self._began: dict[int, float] = {}
        """Start of each async call in progress."""
        self._limit, self._end = MESSAGE_BYTES, float("inf")
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
        self._limit = MESSAGE_BYTES + sum(CALL_BYTES + ROW_BYTES * len(call.rows) for call in self.calls.values())
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

    def messages(self) -> list[Message] | None:
        """New messages from the worker; None if it is dead or its connection is broken (`fault`)."""
        messages: list[Message] = []
        ended = self.process.poll() is not None  # before reading, since messages of a dead worker must still be read
        self.read(self._limit, KINDS, lambda message: messages.append(self._recorded(message)))
        if self.fault is CLOSED:
            with suppress(subprocess.TimeoutExpired):  # a process that has exited closes its end, too
                self.process.wait(EXIT_SECONDS)
                ended, self.fault = True, None
        return None if (ended or self.fault) and not messages else messages

    def _recorded(self, message: Message) -> Message:
        """Checks that a message is about this worker's calls; raises BadMessageError if not."""
        if isinstance(message, Ready):
            self.signature = message.signature
        elif isinstance(message, Rested):
            if self.rested is not False:
                raise BadMessageError
            self.rested = True
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
            self.answered = True
        return message

    def _check(self, done: Done) -> None:
        rows = [self.calls[number].rows for number in done.numbers]
        fits = len(done.seconds) == len(rows) and [*map(len, done.scores)] == [*map(len, rows)]
        if not (fits and all(any(row in part for part in rows) for row in done.notes)):
            raise BadMessageError

    @property
    def disturbed(self) -> bool:
        """True if the function wrote to the connection or closed it, so that results may be lost."""
        return self.fault is not None or bool(self.unread)

    def next_end(self) -> float:
        """The next deadline of a call, on the monotonic clock."""
        ends = (began + self.calls[number].seconds for number, began in self.began().items())
        last = self._end if self.calls else float("inf")
        return min([last, *ends]) + (GRACE if self.signature and self.signature.asynchronous else 0.0)

    def kill(self) -> int:
        """Kills the process, its process group and, if it still runs, its descendants. Returns the exit code."""
        import psutil  # another Python, which imports this module for its environments, may lack it

        self.close()
        if self._killed:  # its id may be another process's by now
            return self.process.wait()
        self._killed = True
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):  # it has ended, or /proc hides processes of other users
            if self.process.poll() is None:
                descendants = psutil.Process(self.process.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for descendant in descendants:  # some are in sessions of their own; orphans may be those of other workers
            with suppress(psutil.Error):  # it has ended, or runs as another user
                descendant.kill()
        exit_code = self.process.wait()
        reap_group(self.process.pid)
        return exit_code

    def fits(self, reward: Reward) -> bool:
        """True if a new process for this function would be equal to this one, which is alive."""
        return self._identity == _identity(reward) and self.process.poll() is None

    def rest(self) -> None:
        """Tells an idle worker to free its GPU; another stage may call its function later."""
        self.rested = False
        self.ask(Rest())

    def has_rested(self, deadline: float) -> bool:
        """Waits until a worker that was told to rest has done so. Returns False if it is in use or has died."""
        while self.rested is False and time.monotonic() < deadline and self.messages() is not None:
            select.select([self.file], [], [], 0.1)
        return self.rested is True and not self.fault

    def dismiss(self) -> None:
        """Tells a worker that has no more calls to exit; kills one that is still importing its function."""
        if self.signature is None:
            self.kill()
        self.close()

    def end(self, deadline: float) -> None:
        """Waits for the process if it was dismissed, then kills the rest of its process group.

        Args:
            deadline: time at which it is killed if it has not exited; all workers exit at the same time.
        """
        dismissed = self._socket.fileno() < 0
        if dismissed and self.process.poll() is None:
            process_end.wait(self.process.pid, deadline - time.monotonic())  # Popen.wait polls with sleeps
        self.kill()


def _identity(reward: Reward) -> object:
    """Everything that a worker process depends on. Each stage has its own token to write with, which none needs."""
    environment = {name: value for name, value in os.environ.items() if name != fence.VARIABLE}
    return reward.column, reward.function, reward.options, reward.threads, os.getcwd(), environment


def adopt_orphans() -> frozenset[int]:
    """Makes this process adopt processes that its workers leave behind. Returns its current children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return frozenset(_children())


def reap_group(leader: int) -> None:
    """Waits until no process of a killed group is left that this process may kill, if it adopts orphans.

    Others are those of another user, as `sudo` starts them.
    """
    with suppress(ProcessLookupError, PermissionError, ChildProcessError):
        while True:
            os.killpg(leader, 0)  # is one left? Its id may be another group's by now, so no signal
            os.waitpid(-leader, 0)


def reap_orphans(others: frozenset[int]) -> None:
    """Reaps orphans that have ended; `others` are children of this process that stay."""
    for child, (session, _) in _children().items():
        if child not in others and session != os.getsid(0):
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def end_orphans(others: frozenset[int]) -> None:
    """Kills orphans: processes that dead workers left behind and that this process adopted, with their children.

    An orphan has our marker in its environment, or is in a different session than this process.

    Args:
        others: children that this process had when it called `adopt_orphans`; they stay alive.
    """
    mark = f"{MARK}={os.getpid()}".encode()
    while orphans := [
        child
        for child, (session, environment) in _children().items()
        if child not in others and (session != os.getsid(0) or mark in environment.split(b"\0"))
    ]:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it has ended, or runs as another user
                others |= {pid}
        for pid in {*orphans} - others:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> dict[int, tuple[int, bytes]]:
    """The session and environment of each child of this process."""
    children = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited meanwhile
            parent, _, session = file.read_text().rpartition(") ")[2].split()[1:4]
            if int(parent) == os.getpid():
                environment = b""
                with suppress(ProcessLookupError):  # it is exiting, and its own children become ours only after that
                    environment = (file.parent / "environ").read_bytes()
                children[int(file.parent.name)] = int(session), environment
    return children


def describe_exit(code: int) -> str:
    """Describes a worker's exit code, in words that follow the function's name."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
