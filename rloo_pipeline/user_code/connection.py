"""The pool's end of the socket to the process of one episode: the request under way, and its answer."""

from __future__ import annotations

import math
import pickle
import time
from contextlib import suppress
from typing import Any, NamedTuple

from rloo_pipeline.user_code.episode import CallTools, RequestDone, ToolText, error_text
from rloo_pipeline.user_code.messages import NO_MESSAGE, BadMessageError, UserCodeProcess
from rloo_pipeline.user_code.worker_process import EXIT_SECONDS, describe_exit

MESSAGE_BYTES = 1 << 23
"""Maximum size of a message. Text and state are limited where they are made; JSON has at most 12 bytes a character."""
KINDS = {kind.__name__: kind for kind in (ToolText, RequestDone)}


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
    """Why the episode cannot go on: its process was killed at its deadline, died, or reset or get_reward raised."""
    seconds: float = 0.0
    """Seconds from the request to its answer, without waiting for a process."""


class Connection(UserCodeProcess):
    """One process as the pool sees it."""

    def __init__(self, episode: int, serial: int, file: int) -> None:
        super().__init__(file)
        self.episode, self.serial = episode, serial
        self.request: str | None = None
        """The request under way."""
        self._done: RequestDone | None = None
        """The last message about it."""
        self.deadline = math.inf
        self._calls: list[tuple[str, Any]] = []
        self._texts: dict[int, ToolText] = {}
        self._began, self._timeout = 0.0, math.inf

    def send(self, kind: str, request: Any, timeout: float) -> None:
        """Sends a request; its deadline is `timeout` seconds from now, and from each answer of a tool."""
        self.request, self._done, self._texts = kind, None, {}
        self._calls = request.calls if isinstance(request, CallTools) else []
        self._began, self._timeout = time.monotonic(), timeout
        if not self.fault:
            self.deadline = self._began + timeout
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; the pool will find out
            self.channel.send(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))

    def done(self) -> RequestDone | None:
        """Reads messages. Returns the last one about the request if it has arrived."""
        if not self.fault:
            self.read(MESSAGE_BYTES, KINDS, self._record)
            if self.fault:  # if it has ended, the pool hears so at once; else it is killed then
                self.deadline = time.monotonic() + (0.0 if self.fault is NO_MESSAGE else EXIT_SECONDS)
        return self._done

    def _record(self, message: ToolText | RequestDone) -> None:
        if self.request is None or self._done is not None:
            raise BadMessageError
        if isinstance(message, ToolText):
            if message.place in self._texts or not 0 <= message.place < max(1, len(self._calls)):
                raise BadMessageError
            self._texts[message.place] = message
            self.deadline = time.monotonic() + self._timeout
        else:
            unanswered = self.request == "call" and not message.bad and len(self._texts) < len(self._calls)
            if unanswered or (message.tools is not None and self.request != "schemas"):
                raise BadMessageError
            self._done = message
            self.deadline = math.inf

    def answer(self, done: RequestDone) -> Answer:
        """The answer to the request that `done` ended, which is then over."""
        texts = [self._texts[place] for place in sorted(self._texts)]
        values = tuple(text.text for text in texts), tuple(text.error for text in texts)
        kind, self.request, self._done = str(self.request), None, None
        return Answer(self.episode, kind, *values, done.reward, done.state, done.lost, time.monotonic() - self._began)

    def exit(self, code: int) -> str:
        """Description of how the process ended, phrased to follow the name of the call."""
        return NO_MESSAGE if self.fault is NO_MESSAGE else describe_exit(code)

    def late(self) -> str:
        """Description of a missed deadline, phrased to follow the name of the call."""
        return self.fault or f"took over {self._timeout:g} s"

    def failed(self, cause: str, loses: bool) -> Answer:
        """The answer to a request whose process has ended: the texts that arrived, and an error for the others.

        Args:
            cause: how it ended, phrased to follow the name of the call.
            loses: True if the episode cannot go on without this process.
        """
        name = "get_reward" if self.request == "finish" else self.request
        unanswered = [place for place in range(len(self._calls)) if place not in self._texts]
        if self.request == "call":
            name = self._calls[unanswered[0] if unanswered else 0][0]
        error = f"{name} {cause}"
        for place in unanswered:
            self._texts[place] = ToolText(place, error_text(error), True)
        return self.answer(RequestDone(lost=error if loses else None))
