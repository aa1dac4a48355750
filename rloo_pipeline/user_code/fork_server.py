"""The process from which episodes are forked: it imports environments and tools once, and ends what it forked.

`fork_server_process.ForkServerProcess` starts it with one end of a socket that keeps messages apart (SOCK_SEQPACKET).
In come pickles: first a ForkServerStart, then (`open`, number), with the socket of the episode, and (`kill`, number).
Out goes JSON: `ready`, `broken` with a message, and `ended` with a number and an exit code. A fork takes milliseconds,
so each episode has a fresh process with everything imported, and nothing that one leaves in it reaches another.

In the sandbox or in an image (`confinement.py`) the process has another Python or other packages than its parent, so it
imports nothing but the standard library and modules of this package that do the same.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import socket
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import process_end
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.contract import EnvironmentCode
from rloo_pipeline.user_code.episode import serve
from rloo_pipeline.user_code.sandbox.inside import limits
from rloo_pipeline.user_code.worker import die_with
from rloo_pipeline.user_code.worker_process import adopt_orphans, end_orphans

PACKET_BYTES = 1 << 16
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
RESERVE = 16
"""Processes in a sandbox that episodes cannot use, so that one more can be forked when episodes use all others."""


class ForkServerStart(NamedTuple):
    """The functions to import."""

    environments: dict[str, str]
    tools: list[str]
    parent: int | None
    """Process id of the parent; None in a sandbox or an image, which end with it by themselves."""
    limits: dict[str, int] | None = None
    """Limits that `limits.apply` sets; only in a sandbox."""
    read_only: tuple[str, ...] = ()
    """Paths that it must be able to read."""


def main(file: int) -> None:
    """Runs the process until the pool closes its end.

    Args:
        file: file descriptor of this end of the socket.
    """
    os.set_inheritable(file, False)
    control = socket.socket(fileno=file)
    start: ForkServerStart = pickle.loads(control.recv(PACKET_BYTES))
    if start.limits is not None:
        limits.apply(start.limits)
        limits.begin()
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # so that no episode opens the memory of another
    if start.parent is not None:
        die_with(start.parent)  # an import may hang; later the end of the stream tells, and what was forked is ended
    try:
        _check_readable(start.read_only)
        code = contract.load(start.environments, start.tools)
        for _, tool in code.tools.values():
            if prepare := getattr(tool, "before_forks", None):
                prepare()
        with suppress(ImportError):  # an image may lack it
            import numpy  # noqa: F401  # so that episodes seed it, also where a tool imports it late
    except (UserError, ValueError, TypeError) as error:
        control.send(json.dumps(["broken", str(error)[: PACKET_BYTES // 8]]).encode())
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    if start.limits is None:  # in a sandbox none outlives its group, and process 1 of the sandbox reaps them
        adopt_orphans()
    gc.collect()
    gc.freeze()
    control.send(json.dumps(["ready"]).encode())
    with suppress(BrokenPipeError, ConnectionResetError):
        ForkServer(control, code, start.limits["processes"] - RESERVE if start.limits else None).run()


def _check_readable(paths: tuple[str, ...]) -> None:
    """Checks paths once the limits are set: in a sandbox that root starts, the process is another user.

    Raises:
        UserError: one cannot be read.
    """
    for path in paths:
        if not os.access(path, os.R_OK | (os.X_OK if Path(path).is_dir() else 0)):
            raise UserError(f"rollout.environment_read_only: the sandbox cannot read {path}; make it readable for all")


class ForkServer:
    """Forks episodes, and reports how they end."""

    def __init__(self, control: socket.socket, code: EnvironmentCode, most: int | None) -> None:
        """Keeps the socket of orders, the imported code, and the most processes of all episodes together."""
        self.control, self.code, self.most = control, code, most
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
        self.processes[episode] = pid, process_end.readable_after(pid)

    def _become(self, file: int) -> None:
        """Serves an episode in the new process, and ends it."""
        status = 1
        try:
            os.setsid()
            die_with(os.getppid())
            self.control.close()
            for _, other in self.processes.values():
                os.close(other)
            os.set_inheritable(file, False)
            if self.most is not None:
                resource.setrlimit(resource.RLIMIT_NPROC, (self.most, self.most))
                limits.stay_in_group()
            with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool closed its end
                serve(file, self.code)
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
