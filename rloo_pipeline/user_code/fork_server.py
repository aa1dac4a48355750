"""The fork server: imports environments and tools once, forks a process for each episode, and kills these processes.

`fork_server_process.ForkServerProcess` starts it with one end of a socket. It receives a ForkServerStart, then Fork,
with the socket of the episode, and Kill. It sends Imported or Broken, then Ended. A fork takes milliseconds, so each
episode gets a fresh process with everything imported, and no episode can affect another through it.

In a sandbox or an image (`confinement.py`), its Python or packages differ from its parent's, so it imports only the
standard library and modules of this package that do the same.
"""

import ctypes
import gc
import os
import resource
import signal
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import process_end
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.contract import EnvironmentCode
from rloo_pipeline.user_code.episode import serve
from rloo_pipeline.user_code.messages import Broken, ParentConnection
from rloo_pipeline.user_code.orphans import adopt_orphans, end_orphans, reap_group
from rloo_pipeline.user_code.sandbox.inside import limits
from rloo_pipeline.user_code.worker import PR_SET_PDEATHSIG, die_with

PR_SET_DUMPABLE = 4
BROKEN_CHARACTERS = 1 << 12
"""Maximum length of the reason why something cannot be imported. In JSON, a character may take 12 bytes."""
RESERVE = 16
"""Number of processes in a sandbox that are reserved, so that the server can still fork when episodes use all
others.
"""


class ForkServerStart(NamedTuple):
    """The first message: the functions to import, and limits."""

    environments: dict[str, str]
    tools: list[str]
    parent: int | None
    """Process id of the parent; None in a sandbox or an image, which die with the parent anyway."""
    limits: dict[str, int] | None = None
    """Limits for `limits.apply`, in a sandbox only."""
    read_only: tuple[str, ...] = ()
    """Paths that the process must be able to read."""


class Fork(NamedTuple):
    """Request: fork a process. The end of its socket comes with the request."""

    number: int


class Kill(NamedTuple):
    """Request: kill a process, if it has not ended."""

    number: int


class Imported(NamedTuple):
    """Message: the environments and tools are imported."""


class Ended(NamedTuple):
    """Message: a process has ended."""

    number: int
    code: int


def main(file: int) -> None:
    """Runs the fork server until the pool closes its end of the socket.

    Args:
        file: file descriptor of this end of the socket.
    """
    pool = ParentConnection(file)
    start: ForkServerStart = pool.receive()
    if start.limits is not None:
        limits.apply(start.limits)
        limits.begin()
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # so that no episode can read another one's memory
    if start.parent is not None:
        die_with(start.parent)  # an import may hang; later, the end of the stream ends this process and all episodes
    try:
        _check_readable(start.read_only)
        code = contract.load(start.environments, start.tools)
        for _, tool in code.tools.values():
            if prepare := getattr(tool, "before_forks", None):
                prepare()
        with suppress(ImportError):  # an image may lack NumPy
            import numpy  # noqa: F401  # so that episodes seed it even if a tool imports it late
    except (UserError, ValueError, TypeError) as error:
        pool.send([Broken(str(error)[:BROKEN_CHARACTERS])])
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    if start.limits is None:  # in a sandbox no process outlives its group, and the sandbox's process 1 reaps them
        adopt_orphans()
    gc.collect()
    gc.freeze()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool closed its end
        pool.send([Imported()])
        ForkServer(pool, code, start.limits["processes"] - RESERVE if start.limits else None).run()


def _check_readable(paths: tuple[str, ...]) -> None:
    """Checks paths after the limits are set, because in a sandbox that root starts, the process then runs as another
    user.

    Raises:
        UserError: one cannot be read.
    """
    for path in paths:
        if not os.access(path, os.R_OK | (os.X_OK if Path(path).is_dir() else 0)):
            raise UserError(f"rollout.environment_read_only: the sandbox cannot read {path}; make it readable for all")


class ForkServer:
    """Forks episodes, and reports how they end."""

    def __init__(self, pool: ParentConnection, code: EnvironmentCode, most: int | None) -> None:
        """Takes the connection to the pool, the imported code, and the maximum number of processes for all episodes
        together.
        """
        self.pool, self.code, self.most = pool, code, most
        self.processes: dict[int, tuple[int, int]] = {}
        """Process id and pidfd of each episode."""
        self.handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        """That of the imported code for children that end; with it, this process could not wait for its own."""

    def run(self) -> None:
        """Serves until the stream ends, then kills all episodes."""
        try:
            while True:
                self._step()
        finally:
            for pid, _ in self.processes.values():
                _kill_group(pid)
            end_orphans(frozenset())

    def _step(self) -> None:
        files = {file: episode for episode, (_, file) in self.processes.items()}
        for file in wait([self.pool.file, *files]):
            if file in files:
                self._end(files[file])
                continue
            request: Fork | Kill = self.pool.receive()
            if isinstance(request, Fork):
                self._open(request.number, self.pool.passed[0])
            elif request.number in self.processes:
                _kill_group(self.processes[request.number][0])

    def _open(self, episode: int, file: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._serve_episode(file)
        os.close(file)
        self.processes[episode] = pid, process_end.readable_after(pid)

    def _serve_episode(self, file: int) -> None:
        """Serves an episode in the new process, and exits."""
        status = 1
        try:
            os.setsid()
            die_with(os.getppid())
            signal.signal(signal.SIGCHLD, self.handler or signal.SIG_DFL)
            self.pool.close()
            for _, other in self.processes.values():
                os.close(other)
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
        _kill_group(pid)  # processes that it left in its group
        _, status = os.waitpid(pid, 0)
        reap_group(pid)
        os.close(file)
        self._reap_orphans()
        self.pool.send([Ended(episode, os.waitstatus_to_exitcode(status))])

    def _reap_orphans(self) -> None:
        """Reaps processes that ended in a session of their own and whose episode has ended."""
        episodes = {pid for pid, _ in self.processes.values()}
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in episodes:  # the end of this episode will reap the others
                    return
                os.waitpid(ended.si_pid, 0)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a process that was just forked may not have its own group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
