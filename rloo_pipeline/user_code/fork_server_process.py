"""The pool's handle on the fork server: starts it, gives it orders, reads its messages, ends it."""

import json
import os
import pickle
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import IO

from rloo_pipeline.errors import UserError, printable
from rloo_pipeline.user_code import confinement, fork_server
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.worker_process import EXIT_SECONDS, describe_exit

SIGNALLED = 128
"""Bubblewrap and Apptainer exit with this number plus that of the signal that killed the process."""
MOST_BYTES = 1 << 24
"""Maximum number of bytes of output to copy. The rest is read and dropped, so that no process blocks on the pipe."""
END_SECONDS = 5.0
"""Maximum wait for remaining output, since a process that outlives the others may keep the pipe open."""


class ForkServerProcess:
    """A subprocess that runs `fork_server.main`."""

    def __init__(self, environments: Mapping[str, str], tools: Sequence[str], where: Confinement, workers: int) -> None:
        """Starts the process.

        Args:
            environments: import strings by name.
            tools: import strings of functions.
            where: sandbox, image or Python in which it runs.
            workers: maximum number of episodes at a time.

        Raises:
            UserError: it cannot be started there, or a file or module does not exist.
        """
        self.where = where
        self.control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = confinement.command(where, [*environments.values(), *tools], child.fileno(), workers)
        self.process = subprocess.Popen(
            command.argv,
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if where.has_own_files else 2,  # its output belongs in the log or on the terminal
            stderr=subprocess.STDOUT if where.has_own_files else None,
            start_new_session=True,
            env=command.environment,
        )
        child.close()
        self.printed = PrintedText(self.process.stdout) if self.process.stdout else None
        names = {name: confinement.reference_inside(where, reference) for name, reference in environments.items()}
        parent = None if where.has_own_files else os.getpid()
        functions = [confinement.reference_inside(where, reference) for reference in tools]
        paths = tuple(confinement.read_only_paths(where))
        start = fork_server.ForkServerStart(names, functions, parent, command.limits, paths)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; `ended` reports it
            self.control.send(pickle.dumps(start))
        self.ready = False
        """True if the environments and tools are imported."""
        self._unread: list[tuple[int, int]] = []

    def tell(self, order: str, process: int, files: Sequence[int] = ()) -> None:
        """Sends an order while reading incoming messages, so that the two processes cannot deadlock.

        Args:
            order: `open` or `kill`.
            process: number of the process to fork or to kill.
            files: for `open`, the file descriptor of its socket.
        """
        data = pickle.dumps((order, process))
        while True:
            try:
                socket.send_fds(self.control, [data], list(files), socket.MSG_DONTWAIT)
            except BlockingIOError:
                wait([self.control], 0.01)
                self._read()
            except (BrokenPipeError, ConnectionResetError):  # it died; `ended` reports it
                return
            else:
                return

    def ended(self) -> list[tuple[int, int]]:
        """Number and exit code of each process that has exited since the last call.

        Raises:
            UserError: the environments or tools cannot be imported, or the process has died.
        """
        self._read()
        ended, self._unread = self._unread, []
        return ended

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    data = self.control.recv(fork_server.PACKET_BYTES, socket.MSG_DONTWAIT)
                except ConnectionResetError:  # it died with orders unread; the messages it sent before that come next
                    continue
                if not data:
                    raise UserError(self._why_it_died())
                kind, *rest = json.loads(data)
                if kind == "broken":
                    raise UserError(rest[0] + self._available_packages())
                if kind == "ready":
                    self.ready = True
                else:
                    self._unread.append((rest[0], rest[1]))

    def _available_packages(self) -> str:
        """Lists the available packages, as a hint after an import error."""
        if self.where.python:
            return f"; it can use the packages of {self.where.python}"
        if not self.where.has_own_files:
            return ""
        packages = f"that {self.where.image} has" if self.where.image else "of Python"
        return f"; it can use the packages {packages}, its own code, and the paths in rollout.environment_read_only"

    def _why_it_died(self) -> str:
        code = self.process.wait()
        if self.where.has_own_files and code - SIGNALLED in {*signal.Signals}:
            code = SIGNALLED - code
        cause = describe_exit(code)
        if self.printed is not None and (line := self.printed.last_line()):
            cause += f", and printed at the end: {line:.300}"
        if self.ready:
            return f"the process from which environments are forked {cause}; the log says what it printed"
        return (
            f"the process that imports rollout.environment and rollout.tools {cause}; import them in Python to see why"
        )

    def end(self) -> None:
        """Ends the fork server and everything that it forked."""
        self.control.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        sandbox.end(self.process, apptainer=bool(self.where.image))
        if self.printed is not None:
            self.printed.close()


class PrintedText:
    """Copies the output of processes in a sandbox or image from a pipe to this process's stderr, in a thread.

    Such processes must not hold this process's files: they could truncate its log or read its terminal.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self._copied, self._tail = 0, b""
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while part := os.read(self.pipe.fileno(), 1 << 16):
            self._tail = (self._tail + part)[-2000:]
            text = part.decode(errors="replace")[: MOST_BYTES - self._copied]
            self._copied += len(text)
            if text:
                os.write(2, printable(text).encode())

    def last_line(self) -> str:
        """The last line that was printed, once the processes have ended."""
        self._thread.join(END_SECONDS)
        lines = self._tail.decode(errors="replace").split("\n")
        return next((printable(line).strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """Waits for the rest of the output."""
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self.pipe.close()
