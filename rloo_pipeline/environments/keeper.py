"""The process from which episodes are forked: it imports environments and tools once, and ends what it forked.

`keeper_process.KeeperProcess` starts it with one end of a socket that keeps messages apart (SOCK_SEQPACKET). In come
pickles: first a KeeperStart, then (`open`, number), with the socket of the episode, and (`kill`, number). Out goes
JSON: `ready`, `broken` with a message, and `ended` with a number and an exit code. A fork takes milliseconds, so each
episode has a fresh process with everything imported, and nothing that one leaves in it reaches another.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import socket
from contextlib import suppress
from multiprocessing.connection import wait
from typing import NamedTuple

from rloo_pipeline.environments import contract, tools
from rloo_pipeline.environments.contract import EnvironmentCode
from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.worker import die_with
from rloo_pipeline.scoring.worker_process import adopt_orphans, end_orphans

PACKET_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1


class KeeperStart(NamedTuple):
    """What to import."""

    environments: dict[str, str]
    tools: list[str]
    parent: int
    """Process id of the parent."""


def main(file: int) -> None:
    """Runs the process until the pool closes its end.

    Args:
        file: file descriptor of this end of the socket.
    """
    os.set_inheritable(file, False)
    control = socket.socket(fileno=file)
    start: KeeperStart = pickle.loads(control.recv(PACKET_BYTES))
    die_with(start.parent)  # an import may hang; later the end of the stream tells, and what was forked is ended
    try:
        code = contract.load(start.environments, start.tools)
        if any(tool is tools.python for _, tool in code.tools.values()):
            tools.confinement()
        import numpy  # noqa: F401  # so that episodes seed it, also where a tool imports it late
    except (UserError, ValueError, TypeError) as error:
        control.send(json.dumps(["broken", str(error)[: PACKET_BYTES // 8]]).encode())
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    adopt_orphans()
    gc.collect()
    gc.freeze()
    control.send(json.dumps(["ready"]).encode())
    with suppress(BrokenPipeError, ConnectionResetError):
        Keeper(control, code).run()


class Keeper:
    """Forks episodes, and reports how they end."""

    def __init__(self, control: socket.socket, code: EnvironmentCode) -> None:
        self.control, self.code = control, code
        self.processes: dict[int, tuple[int, int]] = {}
        """Process id and its file descriptor of each episode."""

    def run(self) -> None:
        """Serves until the stream ends, then kills all."""
        try:
            while self._step():
                pass
        finally:
            for pid, _ in self.processes.values():
                _kill_group(pid)
            end_orphans(frozenset())

    def _step(self) -> bool:
        files = {file: episode for episode, (_, file) in self.processes.items()}
        for file in wait([self.control, *files]):
            if file is not self.control:
                assert isinstance(file, int)
                self._end(files[file])
                continue
            data, passed, _, _ = socket.recv_fds(self.control, PACKET_BYTES, 1)
            if not data:
                return False
            order, episode = pickle.loads(data)
            if order == "open":
                self._open(episode, passed[0])
            elif episode in self.processes:
                _kill_group(self.processes[episode][0])
        return True

    def _open(self, episode: int, file: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(file)
        os.close(file)
        self.processes[episode] = pid, os.pidfd_open(pid)

    def _become(self, file: int) -> None:
        """Serves an episode in the new process, and ends it."""
        from rloo_pipeline.environments import episode

        status = 1
        try:
            os.setsid()
            die_with(os.getppid())
            self.control.close()
            for _, other in self.processes.values():
                os.close(other)
            os.set_inheritable(file, False)
            with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool closed its end
                episode.serve(file, self.code)
            status = 0
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status & 0xFF)

    def _end(self, episode: int) -> None:
        pid, file = self.processes.pop(episode)
        _kill_group(pid)  # what it left in its group
        _, status = os.waitpid(pid, 0)
        os.close(file)
        self.control.send(json.dumps(["ended", episode, os.waitstatus_to_exitcode(status)]).encode())


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a process that was just forked has no group of its own yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
