"""Asks `fork_server` for a command. Each job of a Snakemake under test does so, and starts in half the time without the
imports of json, socket and typing.

As a program it takes the place of torchrun: its arguments are the address, without its null byte, and torchrun's.
"""

import _socket
import os
import select
import sys
import time


class Fork:
    """A command that another process asked for."""

    def __init__(self, address: str, command: list, own_session: bool = False) -> None:
        """Args: socket of the server, what `_become` takes, and whether the command has a session of its own."""
        self._code: int | None = None
        self._connection = _socket.socket(_socket.AF_UNIX)
        self._connection.connect(address)
        self._connection.sendall(ascii((own_session, command)).encode() + b"\n")

    @classmethod
    def of_this_process(cls, address: str, arguments: list[str], **environment: str) -> "Fork":
        """`rloo ARGUMENTS` with the environment, the folder and the output of this process."""
        files = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
        return cls(address, ["rloo_pipeline", arguments, {**os.environ, **environment}, os.getcwd(), *files])

    def wait(self) -> int:
        """The exit status.

        Raises:
            EOFError: the server has ended.
        """
        if self._code is None:
            answer = self._connection.recv(99)  # a few bytes, sent at once
            self._connection.close()
            if not answer:
                raise EOFError("the process that forks has ended")
            self._code = int(answer)
        return self._code

    def poll(self) -> int | None:
        """The exit status, or None while the command runs."""
        if self._code is not None:
            return self._code
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        return self.wait() if poll.poll(0) else None

    def kill(self) -> None:
        """Has the server kill the command, unless it has a session of its own."""
        if self._code is None:
            self._connection.shutdown(_socket.SHUT_WR)


PORTS = range(15_000, 32_000)
"""Of those that Linux gives to no connection by itself, which could have one before the first rank listens."""


def free_port() -> int:
    """A port at which nothing listens."""
    while True:
        port = PORTS[int.from_bytes(os.urandom(4), sys.byteorder) % len(PORTS)]
        probe = _socket.socket()
        try:
            probe.bind(("127.0.0.1", port))
            return port
        except OSError:
            pass
        finally:
            probe.close()


def rank_variables(count: int) -> list[dict[str, str]]:
    """The variables that torchrun would set for each rank of one job."""
    job = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    return [job | {"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)]


if __name__ == "__main__":
    _, address, _, ranks, _, _, *words = sys.argv  # --standalone --nproc-per-node=COUNT -m rloo_pipeline ...
    variables = rank_variables(int(ranks.partition("=")[2]))
    waiting = [Fork.of_this_process(f"\0{address}", words, **of_rank) for of_rank in variables]
    while waiting:
        codes = {fork: fork.poll() for fork in waiting}
        if failed := [code for code in codes.values() if code]:
            sys.exit(failed[0])  # and the server ends the others
        waiting = [fork for fork, code in codes.items() if code is None]
        time.sleep(0.02)
