"""Asks `fork_server` for a command. It imports little, since each job of a Snakemake under test does so."""

import json
import os
import selectors
import socket
import sys
from collections.abc import Sequence
from typing import Any


class Fork:
    """A command that another process asked for."""

    def __init__(self, address: str, command: Sequence[Any], own_session: bool = False) -> None:
        """Args: socket of the server, what `_become` takes, and whether the command has a session of its own."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        self._connection.sendall(json.dumps([own_session, list(command)]).encode() + b"\n")

    @classmethod
    def of_this_process(cls, address: str) -> "Fork":
        """`rloo` with the arguments, the environment, the folder and the output of this process."""
        files = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
        return cls(address, ["rloo_pipeline", sys.argv[1:], dict(os.environ), os.getcwd(), *files])

    def wait(self) -> int:
        """The exit status.

        Raises:
            EOFError: the server has ended.
        """
        with self._connection, self._connection.makefile() as lines:
            if answer := lines.readline():
                return int(answer)
        raise EOFError("the process that forks has ended")

    def poll(self) -> int | None:
        """The exit status, or None while the command runs."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            return self.wait() if selector.select(0) else None
