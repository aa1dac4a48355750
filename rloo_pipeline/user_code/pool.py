"""Runs the processes of many episodes at once. Requests are sent without blocking, and answers are collected as they
arrive.

With an environment, an episode has a process from `reset` to `finish`. With tools alone, it has one for each `call`. At
most `workers` processes exist at a time; other requests wait for a free one. A process that exceeds its deadline is
killed with everything that it started, which does not affect other episodes.
"""

import math
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rloo_pipeline import seeds
from rloo_pipeline.errors import UserError
from rloo_pipeline.transformers_internals import optional_parts
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.contract import ToolSet
from rloo_pipeline.user_code.episode import (
    BeginEpisode,
    CallTools,
    DescribeTools,
    FinishEpisode,
    RequestDone,
    error_text,
)
from rloo_pipeline.user_code.episode_process import Answer, EpisodeProcess
from rloo_pipeline.user_code.fork_server_process import ForkServerProcess
from rloo_pipeline.user_code.process import EXIT_SECONDS, wait_for

IMPORT_SECONDS = 600.0
"""Time limit for importing environments and tools and making their schemas."""
SCHEMAS = -1
"""Number used in place of an episode's for the process that makes schemas."""


class OpenEpisode:
    """An episode in progress."""

    def __init__(self, environment: str | None, seed: int) -> None:
        self.environment, self.seed = environment, seed
        self.calls = 0
        """Number of calls so far; counted only without an environment."""
        self.lost: str | None = None
        """Why it cannot continue."""


class EnvironmentPool:
    """Plays episodes. Use it as a context manager, and create it on the main thread."""

    def __init__(
        self,
        environment: str | Mapping[str, str] | None,
        tools: Sequence[str],
        workers: int,
        timeout: float,
        where: Confinement = Confinement(),  # noqa: B008
    ) -> None:
        """Starts importing the environments and tools.

        Args:
            environment: import string of the environment, or import strings by the value of the column `environment`.
            tools: import strings of functions.
            workers: maximum number of processes at a time.
            timeout: seconds for `reset`, for each tool call, and for the reward.
            where: sandbox, image or Python in which the processes run.

        Raises:
            UserError: they cannot run there.
        """
        self.names = contract.by_name(environment)
        self.workers, self.timeout = workers, timeout
        self._episodes: dict[int, OpenEpisode] = {}
        self._open: dict[int, EpisodeProcess] = {}
        """Processes of the episodes that have one."""
        self._queue: deque[tuple[int, str, Any]] = deque()
        self._answers: list[Answer] = []
        self._sets: dict[str, ToolSet] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # each episode takes an open file here and in the fork server, which inherits the limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 1024 + workers), hard), hard))
        self._fork_server = ForkServerProcess(self.names, tools, where, workers)
        schema_file = optional_parts.schema_file() if where.python or where.image else ""
        self._fork(SCHEMAS, "schemas", DescribeTools(schema_file), IMPORT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._open.values():
            process.close()
        self._fork_server.end(time.monotonic() + EXIT_SECONDS)

    def check(self) -> None:
        """Waits until the environments and tools are imported and their schemas are made.

        Raises:
            UserError: one of them cannot be imported, or violates the contract.
        """
        while not self._sets:
            self._step(math.inf)

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the model can use for a row, for the chat template.

        Raises:
            UserError: as for `check`, or the row does not name a configured environment.
        """
        self.check()
        return self._sets[self.environment_of(row) or ""].schemas

    def gives_reward(self, row: Mapping[str, Any]) -> bool:
        """True if the row's environment has `get_reward`."""
        self.check()
        return self._sets[self.environment_of(row) or ""].gives_reward

    def environment_of(self, row: Mapping[str, Any]) -> str | None:
        """The name of a row's environment; empty if all rows have the same one, None without environments.

        Raises:
            UserError: the row names no environment of the configuration.
        """
        if not self.names or "" in self.names:
            return next(iter(self.names), None)
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
            row: dataset columns, passed to the environment's `reset`.
            seed: seed of the global random generators in the episode.

        Raises:
            UserError: the row names no environment of the configuration.
        """
        name = self.environment_of(row)
        self._episodes[episode] = OpenEpisode(name, seed)
        if name is None:
            self._answers.append(Answer(episode, "reset"))
        else:
            columns = {key: value for key, value in row.items() if not name or key != "environment"}
            self._queue.append((episode, "reset", BeginEpisode(name, columns, seed)))

    def call(self, episode: int, calls: Sequence[tuple[str, Any]]) -> None:
        """Calls tools, one after another.

        Args:
            episode: its number.
            calls: name and arguments of each tool call.
        """
        self._request(episode, "call", CallTools(list(calls)))

    def finish(self, episode: int, completion: Sequence[dict[str, Any]] = ()) -> None:
        """Ends an episode. The answer has the reward and the state.

        Args:
            episode: its number.
            completion: messages after the prompt, for a `get_reward` that takes them.
        """
        self._request(episode, "finish", FinishEpisode(list(completion)))

    def _request(self, number: int, kind: str, request: Any) -> None:
        episode = self._episodes[number]
        if episode.lost is None and episode.environment is not None:
            self._open[number].send(kind, request, self.timeout)
        elif episode.lost is None and kind == "call":
            episode.calls += 1
            seed = seeds.derive(episode.seed, "call", episode.calls)
            self._queue.append((number, kind, request._replace(seed=seed)))
        else:  # there is no process to ask
            texts = (error_text(f"the environment has ended: {episode.lost}"),) * len(getattr(request, "calls", ()))
            self._answers.append(Answer(number, kind, texts, (True,) * len(texts), lost=episode.lost))
            if kind == "finish":
                del self._episodes[number]

    @property
    def waiting(self) -> int:
        """Number of requests without an answer."""
        under_way = sum(process.request is not None for key, process in self._open.items() if key != SCHEMAS)
        return len(self._queue) + len(self._answers) + under_way

    def ready(self, timeout: float) -> list[Answer]:
        """Returns the answers that have arrived. Waits up to `timeout` seconds for one, but not if no request is
        pending.

        Raises:
            UserError: the code cannot be imported or violates the contract, so no episode can be played.
        """
        end = time.monotonic() + timeout
        self._step(0.0)
        while not self._answers and self.waiting and (seconds_left := end - time.monotonic()) > 0:
            self._step(seconds_left)
        answers, self._answers = self._answers, []
        return answers

    def _step(self, seconds: float) -> None:
        """Forks processes for waiting requests, waits for messages, and handles messages and missed deadlines."""
        server = self._fork_server
        while server.ready and self._queue and len(server.running) - (SCHEMAS in self._open) < self.workers:
            self._fork(*self._queue.popleft(), self.timeout)
        wait_for([server, *self._open.values()], seconds)
        server.check()
        for episode, process in list(self._open.items()):
            process.messages()
            if process.done:
                self._finish_request(process, process.done)
            if episode in self._open and process.lost:
                self._lose(process, process.lost)
            elif episode in self._open and process.deadline < time.monotonic():
                self._lose(process, f"took over {process.timeout:g} s")

    def _fork(self, episode: int, kind: str, request: Any, timeout: float) -> None:
        process = self._open[episode] = EpisodeProcess(episode, self._fork_server)
        process.send(kind, request, timeout)

    def _finish_request(self, process: EpisodeProcess, done: RequestDone) -> None:
        if done.bad:
            raise UserError(done.bad)
        if done.tools is None:
            self._answer(process.answer(done))
        else:
            self._sets = done.tools
            self._open.pop(SCHEMAS).kill()

    def _lose(self, process: EpisodeProcess, cause: str) -> None:
        """Answers the request of an episode whose process died or missed its deadline."""
        if process.episode == SCHEMAS:
            raise UserError(f"the schemas of rollout.environment and rollout.tools: their process {cause}")
        episode = self._episodes[process.episode]
        if process.request is not None:
            self._answer(process.failed(cause, loses=episode.environment is not None))
        else:
            episode.lost = f"it {cause} between calls"
            self._open.pop(process.episode).kill()

    def _answer(self, answer: Answer) -> None:
        """Queues an answer, and ends the process if its episode no longer needs it."""
        self._answers.append(answer)
        episode = self._episodes[answer.episode]
        episode.lost = answer.lost
        if answer.request == "finish":
            del self._episodes[answer.episode]
        if answer.lost or answer.request == "finish" or episode.environment is None:
            self._open.pop(answer.episode).kill()
