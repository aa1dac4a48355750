"""The pool's handle on the fork server."""

import math
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from socket import socket
from typing import IO, ClassVar, NamedTuple

from rloo_pipeline.errors import UserError, printable
from rloo_pipeline.user_code import confinement, fork_server
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.fork_server import Ended, Fork, Imported, Kill
from rloo_pipeline.user_code.messages import BadMessageError, Broken
from rloo_pipeline.user_code.process import CLOSED, SpawnedProcess
from rloo_pipeline.user_code.sandbox import sandbox

SIGNALLED = 128
"""Bubblewrap and Apptainer exit with this number plus that of the signal that killed the process."""
MOST_BYTES = 1 << 24
"""Maximum number of bytes of output to copy. The rest is read and dropped, so that no process blocks on the pipe."""
PRINTED_SECONDS = 5.0
"""Maximum wait for remaining output, since a process that outlives the others may keep the pipe open."""
END_SECONDS = 60.0
"""Time limit for the fork server to read a request, and to report the end of a process that was told to exit."""


class ForkServerProcess(SpawnedProcess):
    """A subprocess that runs `fork_server.main`."""

    kinds: ClassVar = {kind.__name__: kind for kind in (Imported, Broken, Ended)}
    limit = 1 << 16

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
        super().__init__()
        self.where = where
        command = confinement.command(where, [*environments.values(), *tools], self.other_end.fileno(), workers)
        self.start(command.argv, command.environment, piped=where.has_own_files)
        self.printed = PrintedText(self.process.stdout) if self.process.stdout else None
        names = {name: confinement.reference_inside(where, reference) for name, reference in environments.items()}
        parent = None if where.has_own_files else os.getpid()
        functions = [confinement.reference_inside(where, reference) for reference in tools]
        paths = tuple(confinement.read_only_paths(where))
        self.ask(fork_server.ForkServerStart(names, functions, parent, command.limits, paths))
        self.ready = False
        """True if the environments and tools are imported."""
        self.running: set[int] = set()
        """Numbers of the forked processes that have not ended."""
        self.exit_codes: dict[int, int] = {}
        """Exit codes of the others."""
        self._ending: set[int] = set()
        """Running processes that were told to exit."""

    def fork(self, end_of_socket: socket) -> int:
        """Forks a process with this end of a socket, and closes the end here. Returns the number of the process."""
        number = len(self.running) + len(self.exit_codes)
        self.running.add(number)
        self._tell(Fork(number), [end_of_socket.fileno()])
        end_of_socket.close()
        return number

    def end_process(self, number: int) -> None:
        """Kills a process that it has forked."""
        if number in self.running:
            self._ending.add(number)
            self.deadline = time.monotonic() + END_SECONDS
            self._tell(Kill(number))

    def _tell(self, request: NamedTuple, files: Sequence[int] = ()) -> None:
        """Sends a request while reading incoming messages, so that the two processes cannot deadlock.

        Raises:
            UserError: as for `check`, or it has read no request for END_SECONDS.
        """
        poll, end = select.poll(), time.monotonic() + END_SECONDS
        poll.register(self.file, select.POLLOUT)
        while not poll.poll(10):
            self.check(end)
        self.ask(request, files)

    def recorded(self, message: Imported | Broken | Ended) -> object:
        """Records what it reports.

        Raises:
            UserError: the environments or tools cannot be imported.
        """
        if isinstance(message, Broken):
            raise UserError(message.message + self._available_packages())
        if isinstance(message, Imported):
            self.ready = True
        elif message.number in self.running:
            self.running.remove(message.number)
            self.exit_codes[message.number] = message.code
            self._ending.discard(message.number)
            self.deadline = time.monotonic() + END_SECONDS if self._ending else math.inf
        else:
            raise BadMessageError
        return message

    def check(self, end: float = math.inf) -> None:
        """Reads its messages.

        Args:
            end: time by which it must have read a request, besides its deadline.

        Raises:
            UserError: the environments or tools cannot be imported; or it has died, or does not do what it was told.
        """
        self.messages()
        if self.lost:
            raise UserError(self._why_it_died(self.lost))
        if min(self.deadline, end) < time.monotonic():
            raise UserError(
                f"the process from which environments are forked has not responded for {END_SECONDS:g} s; "
                "an episode may have stopped it: let no environment send signals to other processes"
            )

    def exit_code(self) -> int | None:
        """The exit code of the process, also of one in a sandbox."""
        code = super().exit_code()
        if code is not None and self.where.has_own_files and code - SIGNALLED in {*signal.Signals}:
            return SIGNALLED - code
        return code

    def _available_packages(self) -> str:
        """Lists the available packages, as a hint after an import error."""
        if self.where.python:
            return f"; it can use the packages of {self.where.python}"
        if not self.where.has_own_files:
            return ""
        packages = f"that {self.where.image} has" if self.where.image else "of Python"
        return f"; it can use the packages {packages}, its own code, and the paths in rollout.environment_read_only"

    def _why_it_died(self, cause: str) -> str:
        if self.printed is not None and (line := self.printed.last_line()):
            cause += f", and printed at the end: {line:.300}"
        if self.ready:
            return f"the process from which environments are forked {cause}; the log says what it printed"
        if self.fault and self.fault == cause:
            did = "closed" if self.fault is CLOSED else "wrote to"
            return (
                f"rollout.environment or rollout.tools, when imported, {did} a file descriptor that was not their own; "
                "let them use only files that they have opened"
            )
        return (
            f"the process that imports rollout.environment and rollout.tools {cause}; import them in Python to see why"
        )

    def end(self, deadline: float) -> None:
        """Ends the fork server and everything that it forked, whose time ends at the deadline."""
        self.close()
        super().end(deadline)
        if self.where.image:
            sandbox.end(self.process, apptainer=True)
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
        self._thread.join(PRINTED_SECONDS)
        lines = self._tail.decode(errors="replace").split("\n")
        return next((printable(line).strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """Waits for the rest of the output."""
        self._thread.join(PRINTED_SECONDS)
        if not self._thread.is_alive():
            self.pipe.close()
