"""Processes for many episodes at once: requests are sent, and answers come when they are ready; nothing waits.

With an environment, an episode has a process from `reset` to `finish`. With tools alone it has one for each `call`. At
most `workers` processes exist at a time, and other requests wait for one. A process that exceeds its deadline is killed
with all that it started; the other episodes do not notice.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from rloo_pipeline import seeds
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.connection import Answer, Connection
from rloo_pipeline.user_code.contract import ToolSet
from rloo_pipeline.user_code.episode import (
    BeginEpisode,
    CallTools,
    DescribeTools,
    FinishEpisode,
    RequestDone,
    error_text,
)
from rloo_pipeline.user_code.fork_server_process import ForkServerProcess
from rloo_pipeline.user_code.worker_process import describe_exit

IMPORT_SECONDS = 600.0
"""Time limit for importing environments and tools, and for making their schemas."""
SCHEMAS = -1
"""Number of the process that makes schemas, in the place of an episode."""


class EnvironmentPool:
    """Plays episodes; a context manager. Make it on the main thread."""

    def __init__(
        self,
        environment: str | Mapping[str, str] | None,
        tools: Sequence[str],
        workers: int,
        timeout: float,
        where: Confinement = Confinement(),  # noqa: B008
    ) -> None:
        """Starts to import the environments and tools.

        Args:
            environment: import string of the environment; or import strings by what the column `environment` says.
            tools: import strings of functions.
            workers: most processes at a time.
            timeout: seconds for `reset`, for each call of a tool, and for the reward.
            where: the processes run.

        Raises:
            UserError: they cannot run there.
        """
        self.names = contract.by_name(environment)
        self.workers, self.timeout = workers, timeout
        self._mapping = isinstance(environment, Mapping)
        self._rows: dict[int, tuple[str | None, dict[str, Any], int]] = {}
        """Environment, row and seed of each episode."""
        self._turns: dict[int, int] = {}
        """Calls so far of each episode without an environment."""
        self._open: dict[int, Connection] = {}
        self._ending: set[int] = set()
        """Processes that were told to end and have not ended."""
        self._queue: deque[tuple[int, str, Any]] = deque()
        self._answers: list[Answer] = []
        self._lost: dict[int, str] = {}
        self._sets: dict[str, ToolSet] = {}
        self._serial = 0
        self._fork_server = ForkServerProcess(self.names, tools, where, workers)
        self._fork(SCHEMAS, "schemas", IMPORT_SECONDS, [DescribeTools(self._fork_server.schema_file)])

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open.values():
            connection.close()
        self._fork_server.end()

    def check(self) -> None:
        """Waits until the environments and tools are imported and their schemas made.

        Raises:
            UserError: one of them cannot be imported, or does not keep the contract.
        """
        while not self._sets:
            self._step(math.inf)

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the model has for a row, for the chat template.

        Raises:
            UserError: as `check`; or the row names no environment of the configuration.
        """
        self.check()
        return self._sets[self._environment_of(row) or ""].schemas

    def gives_reward(self, row: Mapping[str, Any]) -> bool:
        """True if the environment of a row has `get_reward`."""
        self.check()
        return self._sets[self._environment_of(row) or ""].gives_reward

    def _environment_of(self, row: Mapping[str, Any]) -> str | None:
        if not self._mapping:
            return "" if self.names else None
        name = row.get("environment")
        if name not in self.names:
            raise UserError(
                f"a row has {name!r} in the column 'environment', and rollout.environment has "
                f"{', '.join(sorted(self.names))}; add it there, or correct the row"
            )
        return str(name)

    def reset(self, episode: int, row: Mapping[str, Any], seed: int) -> None:
        """Begins an episode.

        Args:
            episode: a number that no other open episode has.
            row: columns of the dataset, the arguments of the environment's `reset`.
            seed: seed of the global random generators in the episode.

        Raises:
            UserError: the row names no environment of the configuration.
        """
        name = self._environment_of(row)
        columns = {key: value for key, value in row.items() if not (self._mapping and key == "environment")}
        self._rows[episode] = name, columns, seed
        if name is None:
            self._turns[episode] = 0
            self._answers.append(Answer(episode, "reset"))
        else:
            self._queue.append((episode, "reset", None))

    def call(self, episode: int, calls: Sequence[tuple[str, Any]]) -> None:
        """Calls tools, one after the other.

        Args:
            episode: its number.
            calls: names of tools and their arguments.
        """
        self._request(episode, "call", CallTools(list(calls)))

    def finish(self, episode: int, completion: Sequence[dict[str, Any]] = ()) -> None:
        """Ends an episode; its answer has the reward and the state.

        Args:
            episode: its number.
            completion: the messages after the prompt, for a `get_reward` that names them.
        """
        self._request(episode, "finish", FinishEpisode(list(completion)))

    def _request(self, episode: int, kind: str, request: Any) -> None:
        if episode in self._lost:
            texts = [error_text(f"the environment has ended: {self._lost[episode]}")] * len(
                getattr(request, "calls", ())
            )
            self._answers.append(Answer(episode, kind, tuple(texts), (True,) * len(texts), lost=self._lost[episode]))
        elif self._rows[episode][0] is not None:
            self._open[episode].send(kind, request, self.timeout)
            return
        elif kind == "call":
            self._queue.append((episode, kind, request))
        else:
            self._answers.append(Answer(episode, kind))
        if kind == "finish":
            self._forget(episode)

    def _forget(self, episode: int) -> None:
        for table in (self._rows, self._turns, self._lost):
            table.pop(episode, None)

    @property
    def waiting(self) -> int:
        """Number of requests without an answer."""
        under_way = sum(connection.request is not None for key, connection in self._open.items() if key != SCHEMAS)
        return len(self._queue) + len(self._answers) + under_way

    def ready(self, timeout: float) -> list[Answer]:
        """The answers that came; waits for one at most `timeout` seconds, and not at all if nothing is asked.

        Raises:
            UserError: the code cannot be imported or does not keep the contract, so that no episode can be played.
        """
        end = time.monotonic() + timeout
        self._step(0.0)
        while not self._answers and self.waiting and (seconds_left := end - time.monotonic()) > 0:
            self._step(seconds_left)
        answers, self._answers = self._answers, []
        return answers

    def _step(self, seconds: float) -> None:
        """Starts what waits for a process, waits for messages, and handles them and what is late."""
        self._fork_waiting()
        ends = [connection.deadline for connection in self._open.values()]
        seconds = max(0.0, min(seconds, min(ends, default=math.inf) - time.monotonic()))
        files: list[Any] = [one.channel.file for one in self._open.values() if not one.closed]
        files.append(self._fork_server.control)
        wait(files, None if math.isinf(seconds) else seconds)
        for episode, connection in list(self._open.items()):
            if self._fork_server.ready and (done := connection.read()):
                self._finish_request(episode, connection, done)
        self._read_fork_server()
        for episode, connection in list(self._open.items()):
            if connection.deadline < time.monotonic():
                self._lose(episode, connection.late())

    def _fork_waiting(self) -> None:
        for _ in range(len(self._queue)):
            if len(self._open.keys() - {SCHEMAS}) + len(self._ending) >= self.workers:
                break
            episode, kind, request = self._queue.popleft()
            name, row, seed = self._rows[episode]
            if name is None:
                self._turns[episode] += 1
                begin = BeginEpisode(None, {}, seeds.derive(seed, "call", self._turns[episode]))
                self._fork(episode, kind, self.timeout, [begin, request])
            else:
                self._fork(episode, kind, self.timeout, [BeginEpisode(name, row, seed)])

    def _fork(self, episode: int, kind: str, timeout: float, requests: list[Any]) -> None:
        parent, child = socket.socketpair()
        self._serial += 1
        connection = self._open[episode] = Connection(episode, self._serial, parent.detach())
        self._fork_server.tell("open", self._serial, [child.fileno()])
        child.close()
        for request in requests:
            connection.send(kind, request, timeout if self._fork_server.ready else IMPORT_SECONDS)

    def _read_fork_server(self) -> None:
        was_ready = self._fork_server.ready
        ended = self._fork_server.ended()
        if self._fork_server.ready and not was_ready:
            for connection in self._open.values():
                connection.restart_clock(self.timeout)
        for serial, code in ended:
            self._ended(serial, code)

    def _ended(self, serial: int, code: int) -> None:
        self._ending.discard(serial)
        for episode, connection in list(self._open.items()):
            if connection.serial == serial:
                if done := connection.read():
                    self._finish_request(episode, connection, done)
                else:
                    self._lose(episode, connection.fault or describe_exit(code), ended=True)

    def _finish_request(self, episode: int, connection: Connection, done: RequestDone) -> None:
        if done.bad:
            raise UserError(done.bad)
        if done.tools is not None:
            self._sets = done.tools
            self._close(episode)
            return
        answer = connection.answer(done)
        self._answers.append(answer)
        if done.lost and answer.request != "finish":
            self._lost[episode] = done.lost
        if done.lost or answer.request == "finish" or self._rows[episode][0] is None:
            self._close(episode)
        if answer.request == "finish":
            self._forget(episode)

    def _lose(self, episode: int, cause: str, ended: bool = False) -> None:
        """Answers a request whose process died or is late."""
        connection = self._open[episode]
        if episode == SCHEMAS:
            raise UserError(f"the schemas of rollout.environment and rollout.tools: their process {cause}")
        if connection.request is not None:
            error = f"{connection.place_of_fault()} {cause}"
            alone = self._rows[episode][0] is None
            answer = connection.failed(error, lost=None if alone else error)
            self._answers.append(answer)
            if answer.request == "finish":
                self._forget(episode)
            elif answer.lost:
                self._lost[episode] = answer.lost
        else:
            self._lost[episode] = f"its process {cause} between calls"
        self._close(episode, ended)

    def _close(self, episode: int, ended: bool = False) -> None:
        connection = self._open.pop(episode)
        connection.close()
        if not ended:
            self._ending.add(connection.serial)
            self._fork_server.tell("kill", connection.serial)
