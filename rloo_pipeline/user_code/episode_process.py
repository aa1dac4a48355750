"""The pool's handle on an episode's process: tracks the pending request and its answer."""

import math
import time
from typing import Any, ClassVar, NamedTuple

from rloo_pipeline.user_code.episode import CallTools, RequestDone, ToolText, error_text
from rloo_pipeline.user_code.fork_server_process import ForkServerProcess
from rloo_pipeline.user_code.messages import BadMessageError
from rloo_pipeline.user_code.process import UserCodeProcess


class Answer(NamedTuple):
    """The answer to one request."""

    episode: int
    request: str
    """`reset`, `call` or `finish`."""
    texts: tuple[str, ...] = ()
    """Result of each call; for `reset`, the observation if any."""
    errors: tuple[bool, ...] = ()
    """True for each text that is an error."""
    reward: float | None = None
    """Result of `get_reward`, in the answer to `finish`."""
    state: str | None = None
    """The public attributes of the environment as JSON, in the answer to `finish`."""
    lost: str | None = None
    """Why the episode cannot continue: its process died or was killed at its deadline, or reset or get_reward
    raised.
    """


class EpisodeProcess(UserCodeProcess):
    """The process of an episode, which the fork server forks, kills and waits for."""

    kinds: ClassVar = {kind.__name__: kind for kind in (ToolText, RequestDone)}
    limit = 1 << 23
    """Text and state are limited at the source; JSON takes at most 12 bytes per character."""

    def __init__(self, episode: int, server: ForkServerProcess) -> None:
        super().__init__()
        self.episode = episode
        self._server, self._number = server, server.fork(self.other_end)
        self.request: str | None = None
        """The pending request."""
        self.done: RequestDone | None = None
        """The last message about it."""
        self._calls: list[tuple[str, Any]] = []
        self._texts: dict[int, ToolText] = {}
        self.timeout = math.inf

    def exit_code(self) -> int | None:
        """The exit code, if the fork server has reported it."""
        return self._server.exit_codes.get(self._number)

    def kill(self) -> None:
        """Kills the process and everything that it started."""
        self.close()
        self._server.end_process(self._number)

    def send(self, kind: str, request: Any, timeout: float) -> None:
        """Sends a request. Its deadline is `timeout` seconds from now, and from each tool's answer."""
        self.request, self.done, self._texts = kind, None, {}
        self._calls = request.calls if isinstance(request, CallTools) else []
        self.timeout = timeout
        if not self.fault:
            self.deadline = time.monotonic() + timeout
        self.ask(request)

    def recorded(self, message: ToolText | RequestDone) -> object:
        """Records an answer; raises BadMessageError if it does not belong to the request."""
        if self.request is None or self.done is not None:
            raise BadMessageError
        if isinstance(message, ToolText):
            if message.place in self._texts or not 0 <= message.place < max(1, len(self._calls)):
                raise BadMessageError
            self._texts[message.place] = message
            self.deadline = time.monotonic() + self.timeout
        else:
            unanswered = self.request == "call" and not message.bad and len(self._texts) < len(self._calls)
            if unanswered or (message.tools is not None and self.request != "schemas"):
                raise BadMessageError
            self.done = message
            self.deadline = math.inf
        return message

    def answer(self, done: RequestDone) -> Answer:
        """Closes the request that `done` completes, and returns its answer."""
        texts = [self._texts[place] for place in sorted(self._texts)]
        values = tuple(text.text for text in texts), tuple(text.error for text in texts)
        kind, self.request, self.done = str(self.request), None, None
        return Answer(self.episode, kind, *values, done.reward, done.state, done.lost)

    def failed(self, cause: str, loses: bool) -> Answer:
        """The answer to a request whose process has exited: the texts that arrived, and an error for each missing one.

        Args:
            cause: how it exited, in words that follow the name of the call.
            loses: True if the episode cannot continue without this process.
        """
        name = "get_reward" if self.request == "finish" else self.request
        unanswered = [place for place in range(len(self._calls)) if place not in self._texts]
        if self.request == "call":
            name = self._calls[unanswered[0] if unanswered else 0][0]
        error = f"{name} {cause}"
        for place in unanswered:
            self._texts[place] = ToolText(place, error_text(error), True)
        return self.answer(RequestDone(lost=error if loses else None))
