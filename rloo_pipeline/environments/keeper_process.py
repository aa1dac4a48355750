"""The process from which episodes are forked, as the pool sees it: start it, give orders, read its messages, end it."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from rloo_pipeline.environments import keeper
from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.worker_process import ENVIRONMENT, EXIT_SECONDS, MARK, THREADS, describe_exit

BOOT = "import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; from {} import main; main({})"


class KeeperProcess:
    """A subprocess that runs `keeper.main`."""

    def __init__(self, environments: dict[str, str], tools: Sequence[str]) -> None:
        self.control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT.format(keeper.__name__, child.fileno()), *sys.path],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what tools print belongs to the log or the terminal
            start_new_session=True,
            env=os.environ | ENVIRONMENT | {MARK: str(os.getpid())} | dict.fromkeys(THREADS, "1"),
        )
        child.close()
        self.control.send(pickle.dumps(keeper.KeeperStart(environments, list(tools), os.getpid())))
        self.ready = False
        """Whether the environments and tools are imported."""
        self._unread: list[tuple[int, int]] = []

    def tell(self, order: str, process: int, files: Sequence[int] = ()) -> None:
        """Sends an order, and reads what the other process sends meanwhile, so that neither waits for the other.

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
        """The processes that have ended since the last call: number and exit code.

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
                    data = self.control.recv(keeper.PACKET_BYTES, socket.MSG_DONTWAIT)
                except ConnectionResetError:  # it died with orders unread: what it sent before comes next
                    continue
                if not data:
                    raise UserError(self._why_it_died())
                kind, *rest = json.loads(data)
                self._handle(kind, rest)

    def _handle(self, kind: str, rest: list[Any]) -> None:
        if kind == "broken":
            raise UserError(rest[0])
        if kind == "ready":
            self.ready = True
        else:
            self._unread.append((rest[0], rest[1]))

    def _why_it_died(self) -> str:
        how = describe_exit(self.process.wait())
        if self.ready:
            return f"the process from which environments are forked {how}; the log says what it printed"
        return f"the process that imports rollout.environment and rollout.tools {how}; import them in Python to see why"

    def end(self) -> None:
        """Ends the process and all that it forked."""
        self.control.close()
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
