"""The handle on a process that runs user code, whatever it runs: it starts, answers requests, and ends or is lost.

    handle                    runs             starts by            ends by
    WorkerProcess             worker.py        a new Python         a signal to its group and its descendants
    ForkServerProcess         fork_server.py   a new Python         the end of its socket, then a signal to its group
    EpisodeProcess            episode.py       the fork server      the fork server, since it may be in a sandbox

`WorkerPools` (dispatch.py) owns workers, `EnvironmentPool` (pool.py) a fork server and the processes of episodes. They
wait with `wait_for`, read `messages`, and then replace a process that is `lost` or past its `deadline`. They differ in
what they do then: a call of a reward function can be made again in any process, and a request of an episode in none.

User code can send this process anything, or half a message, or stop reading, so this end accepts only JSON, up to a
size limit, and never waits for the rest of a message. It sends its requests, which are pickles, in sealed in-memory
files: the socket's buffer is small, and this process would block until the other one reads.
"""

import fcntl
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from socket import send_fds, socketpair
from typing import Any, ClassVar, NamedTuple

from rloo_pipeline.runtime import process_end
from rloo_pipeline.user_code.messages import LENGTH, BadMessageError, decode_report
from rloo_pipeline.user_code.orphans import MARK, reap_group

BOOT = "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; from {} import main; main(*{})"
"""Code that a new process runs. Its arguments are this process's sys.path."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
"""Every worker has the same hash seed, so that sets of strings have the same order and scores do not depend on the
number of workers.
"""
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME")
"""Environment variables that are not passed on to another Python."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
NO_MESSAGE = "wrote to a file descriptor that belongs to the process that calls it"
"""How user code broke its connection, in words that follow the name of a function."""
CLOSED = "closed a file descriptor that belongs to the process that calls it"
READ_SECONDS = 1.0
"""Maximum time that this process spends reading from one process."""
EXIT_SECONDS = 5.0
"""Seconds that a process has to exit by itself once its connection is closed."""


class UserCodeProcess:
    """A process that runs user code at the other end of a socket. It may close the socket or write anything to it."""

    kinds: ClassVar[Mapping[str, type]]
    """Messages that it sends, by name."""
    limit: int
    """Maximum size of a message in bytes."""

    def __init__(self) -> None:
        self._socket, self.other_end = socketpair()
        self.file = self._socket.fileno()
        self.fault: str | None = None
        """How the connection broke: NO_MESSAGE or CLOSED; None while it works."""
        self.lost: str | None = None
        """How the process was lost, in words that follow the name of a function: it ended, or broke its connection."""
        self.deadline = math.inf
        """Time by which it must answer, or must have exited if it closed its connection."""
        self.unread = bytearray()
        """Bytes that have arrived and are not a whole message yet."""

    def ask(self, request: NamedTuple, files: Sequence[int] = ()) -> None:
        """Sends a request and files without waiting until it is read. The process cannot change or enlarge it."""
        with os.fdopen(os.memfd_create("request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
            pickle.dump(request, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            with suppress(BrokenPipeError, ConnectionResetError):  # the process died; `messages` will notice
                send_fds(self._socket, [b"\0"], [file.fileno(), *files])

    def close(self) -> None:
        """Closes this end; a second call does nothing."""
        self._socket.close()

    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs."""
        raise NotImplementedError

    def next_end(self) -> float:
        """The next time limit of the process, on the monotonic clock."""
        return self.deadline

    def recorded(self, message: Any) -> Any:
        """Checks that a message is possible at this point and returns it; raises BadMessageError if not."""
        return message

    def messages(self) -> list[Any]:
        """Reads the messages that have arrived, and sets `lost` once there can be no more."""
        messages: list[Any] = []
        code = self.exit_code()  # before reading, since messages of a dead process must still be read
        complete = self._read_into(messages)
        if self.fault is CLOSED and code is None:
            code = self.exit_code()  # a process that has exited closes its end, too
        if self.fault is NO_MESSAGE:
            self.lost = self.fault
        elif complete and code is not None:
            self.lost = describe_exit(code)
        elif self.fault and self.deadline <= time.monotonic():
            self.lost = self.fault
        return messages

    def _read_into(self, messages: list[Any]) -> bool:
        """Appends the messages that have arrived, unless the connection is broken; returns True if nothing is left."""
        end = time.monotonic() + READ_SECONDS
        poll = select.poll()
        poll.register(self.file, select.POLLIN)
        try:
            while not self.fault and poll.poll(0):
                if time.monotonic() > end:
                    return False
                data = b""
                with suppress(ConnectionResetError):
                    data = os.read(self.file, 1 << 18)
                if not data:
                    self.fault, self.deadline = CLOSED, time.monotonic() + EXIT_SECONDS
                self.unread += data
                for report in self._complete():
                    messages += map(self.recorded, decode_report(report, self.kinds))
        except BadMessageError:
            self.fault = NO_MESSAGE
        return True

    def _complete(self) -> Iterator[bytearray]:
        """Takes complete messages out of the buffer."""
        size = LENGTH.size
        while len(self.unread) >= size:
            end = size + LENGTH.unpack_from(self.unread)[0]
            if end > size + self.limit:
                raise BadMessageError
            if len(self.unread) < end:
                return
            message = self.unread[size:end]
            del self.unread[:end]
            yield message


class SpawnedProcess(UserCodeProcess):
    """A new Python in a session of its own."""

    process: subprocess.Popen[bytes]
    _killed = False

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = (), piped: bool = False
    ) -> None:
        """Starts it.

        Args:
            argv: the command.
            environment: its environment variables.
            files: file descriptors that it inherits, besides its end of the socket.
            piped: True to read its output; otherwise it belongs in the log or on the terminal.
        """
        self.process = subprocess.Popen(
            argv,
            pass_fds=[self.other_end.fileno(), *files],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else 2,
            stderr=subprocess.STDOUT if piped else None,
            start_new_session=True,
            env=environment,
        )
        self.other_end.close()

    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs. Waits for its exit if it has closed its connection."""
        if self.fault is CLOSED:
            self._wait(self.deadline)
        return self.process.poll()

    def _wait(self, deadline: float) -> None:
        if self.process.poll() is None:
            process_end.wait(self.process.pid, deadline - time.monotonic())  # Popen.wait polls with sleeps

    def kill(self) -> int:
        """Kills the process, its process group and, if it still runs, its descendants. Returns the exit code."""
        import psutil  # the Python of an OpenEnv server, which imports this module, may lack it

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

    def end(self, deadline: float) -> None:
        """Waits for the process if its connection was closed, then kills the rest of its process group.

        Args:
            deadline: time at which it is killed if it has not exited; all workers exit at the same time.
        """
        if self._socket.fileno() < 0:
            self._wait(deadline)
        self.kill()


def wait_for(processes: Sequence[UserCodeProcess], seconds: float) -> None:
    """Waits for a message of one of the processes or a time limit of one, at most so many seconds."""
    seconds = max(0.0, min([seconds, *(process.next_end() - time.monotonic() for process in processes)]))
    files = [process.file for process in processes if not process.fault]
    wait(files, None if math.isinf(seconds) else seconds)


def python_command(module: str, *arguments: object) -> list[str]:
    """The command of a new Python that calls `main` of a module, with this process's sys.path."""
    return [sys.executable, "-c", BOOT.format(module, arguments), *sys.path]


def environment_with(threads: int) -> dict[str, str]:
    """The environment of a new process whose libraries use so many threads."""
    return os.environ | ENVIRONMENT | {MARK: str(os.getpid())} | dict.fromkeys(THREADS, str(threads))


def describe_exit(code: int) -> str:
    """Describes the exit code of a process, in words that follow the function's name."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
