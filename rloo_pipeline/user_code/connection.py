"""The pool's end of the socket to an episode's process: tracks the pending request and its answer."""

import math
import time
from typing import Any, NamedTuple

from rloo_pipeline.user_code.episode import CallTools, RequestDone, ToolText, error_text
from rloo_pipeline.user_code.messages import NO_MESSAGE, BadMessageError, UserCodeProcess
from rloo_pipeline.user_code.worker_process import EXIT_SECONDS

MESSAGE_BYTES = 1 << 23
"""Maximum size of a message. Text and state are limited at the source; JSON takes at most 12 bytes per character."""
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
    """Why the episode cannot continue: its process died or was killed at its deadline, or reset or get_reward
    raised.
    """


class Connection(UserCodeProcess):
    """The pool's handle on an episode's process."""

    def __init__(self, episode: int, serial: int) -> None:
        super().__init__()
        self.episode, self.serial = episode, serial
        self.request: str | None = None
        """The pending request."""
        self._done: RequestDone | None = None
        """The last message about it."""
        self.deadline = math.inf
        self._calls: list[tuple[str, Any]] = []
        self._texts: dict[int, ToolText] = {}
        self.timeout = math.inf

    def send(self, kind: str, request: Any, timeout: float) -> None:
        """Sends a request. Its deadline is `timeout` seconds from now, and from each tool's answer."""
        self.request, self._done, self._texts = kind, None, {}
        self._calls = request.calls if isinstance(request, CallTools) else []
        self.timeout = timeout
        if not self.fault:
            self.deadline = time.monotonic() + timeout
        self.ask(request)

    def done(self) -> RequestDone | None:
        """Reads the messages that have arrived. Returns the one that completes the request, if it is among them."""
        if not self.fault:
            self.read(MESSAGE_BYTES, KINDS, self._record)
            if self.fault:  # the pool hears at once if the process has exited; otherwise it is killed at its deadline
                self.deadline = time.monotonic() + (0.0 if self.fault is NO_MESSAGE else EXIT_SECONDS)
        return self._done

    def _record(self, message: ToolText | RequestDone) -> None:
        if self.request is None or self._done is not None:
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
            self._done = message
            self.deadline = math.inf

    def answer(self, done: RequestDone) -> Answer:
        """Closes the request that `done` completes, and returns its answer."""
        texts = [self._texts[place] for place in sorted(self._texts)]
        values = tuple(text.text for text in texts), tuple(text.error for text in texts)
        kind, self.request, self._done = str(self.request), None, None
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
