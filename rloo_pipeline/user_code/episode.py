"""Runs one episode in its own process: calls the environment or the tools and sends back text.

The process is forked from the fork server (`fork_server.py`). Requests arrive as pickles, but answers are sent as JSON,
because the environment's code shares this process and could write anything into the socket (see
`user_code/process.py`).

The text is what TRL puts into tool messages: `str` of the tool's result, or `{'error': '…'}` if it raises.
"""

import asyncio
import inspect
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rloo_pipeline import seeds
from rloo_pipeline.errors import UserError
from rloo_pipeline.transformers_internals import optional_parts
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.contract import EnvironmentCode, ToolSet
from rloo_pipeline.user_code.messages import ParentConnection
from rloo_pipeline.user_code.reward_call import BadOutputError, checked_scores, signature_of
from rloo_pipeline.user_code.worker import CallerOfUserCode, only_in

ANSWER_CHARACTERS = 1 << 16
"""Maximum length of an answer in characters. The rest is cut off, and the answer says so."""
STATE_CHARACTERS = 1 << 18
"""Maximum length of an episode's state as JSON, and of each attribute in it, in characters."""


class BeginEpisode(NamedTuple):
    """Request: seed this process, and reset the environment."""

    environment: str
    row: Mapping[str, Any]
    seed: int


class CallTools(NamedTuple):
    """Request: call tools in order, each given by name and arguments."""

    calls: list[tuple[str, Any]]
    seed: int | None = None
    """Seed of this process, without an environment."""


class FinishEpisode(NamedTuple):
    """Request: return the reward and the state."""

    completion: list[dict[str, Any]]
    """The episode's messages after the prompt."""


class DescribeTools(NamedTuple):
    """Request: describe the tools of each environment."""

    schema_file: str
    """Path of the module that makes schemas, for an image that may lack transformers."""


class ToolText(NamedTuple):
    """The answer to one call of `CallTools`, or the observation for `BeginEpisode`."""

    place: int
    text: str
    error: bool


class RequestDone(NamedTuple):
    """The last message about a request."""

    reward: float | None = None
    state: str | None = None
    lost: str | None = None
    """Why the episode cannot continue, if it cannot."""
    bad: str | None = None
    """How the environment violates the contract, if it does; no episode can then be played."""
    tools: dict[str, ToolSet] | None = None
    """Answer to `DescribeTools`, by environment."""


def serve(file: int, code: EnvironmentCode) -> None:
    """Answers requests until the other end closes the socket.

    Args:
        file: file descriptor of the socket.
        code: the environments and tools.
    """
    parent, episode = ParentConnection(file), Episode(code)

    def send(reply: ToolText | RequestDone) -> None:
        parent.send([reply])

    while True:
        request = parent.receive()
        try:
            send(episode.handle(request, send))
        except UserError as error:
            send(RequestDone(bad=str(error)))


class Episode(CallerOfUserCode):
    """Answers requests with an environment, or with tools alone."""

    def __init__(self, code: EnvironmentCode) -> None:
        super().__init__()
        self.code = code
        self.environment: Any = None
        self.tools: dict[str, Callable[..., Any]] = {name: tool for name, (_, tool) in code.tools.items()}

    def handle(self, request: Any, send: Callable[[ToolText], None]) -> RequestDone:
        """Answers one request.

        Raises:
            UserError: the environment violates the contract.
        """
        if isinstance(request, BeginEpisode):
            return self.begin(request, send)
        if isinstance(request, CallTools):
            if request.seed is not None:
                seed_generators(request.seed)
            return self.call(request.calls, send)
        if isinstance(request, FinishEpisode):
            return self.finish(request.completion)
        if request.schema_file or not contract.OF_TYPES & sys.modules.keys():
            optional_parts.load_schema_maker(request.schema_file or optional_parts.schema_file())
        return RequestDone(tools=contract.tool_sets(self.code))

    def begin(self, request: BeginEpisode, send: Callable[[ToolText], None]) -> RequestDone:
        """Creates the environment and resets it."""
        seed_generators(request.seed)
        self.reference, factory = self.code.environments[request.environment]
        try:
            self.environment = self._run(factory)
            kind = type(self.environment)
            self.tools |= {name: getattr(self.environment, name) for name in contract.tool_methods(kind)}
            observation = self._run(self.environment.reset, **self._arguments_of_reset(request.row))
            if not isinstance(observation, str | list | None):
                raise UserError(
                    f"'{self.reference}': {kind.__name__}.reset returned {observation!r:.50}, which is of type "
                    f"{type(observation).__name__}; return text or None"
                )
            text = None if observation is None else answer_text(observation)
        except (Exception, asyncio.CancelledError) as error:
            return self._lost("reset", error)
        if text is not None:
            send(ToolText(0, text, False))
        return RequestDone()

    def _arguments_of_reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that reset accepts. TRL passes all of them, and refuses a reset without `**kwargs`."""
        signature = signature_of(self.environment.reset)
        for name in signature.required:
            if name not in row:
                raise UserError(
                    f"'{self.reference}': {type(self.environment).__name__}.reset needs a column '{name}', which the "
                    f"dataset lacks; there are {', '.join(sorted(row))}"
                )
        return {name: row[name] for name in signature.takes(row)}

    def call(self, calls: list[tuple[str, Any]], send: Callable[[ToolText], None]) -> RequestDone:
        """Calls tools in order; async tools run concurrently."""
        together: dict[int, Any] = {}
        for place, (name, arguments) in enumerate(calls):
            with _errors_sent(place, send):
                if name not in self.tools:
                    raise ValueError(f"Tool {name} not found.")
                if inspect.iscoroutinefunction(self.tools[name]):
                    together[place] = self.tools[name](**arguments)
                else:
                    send(ToolText(place, answer_text(self._run(self.tools[name], **arguments)), False))
        if together:
            self._run(self._answer_together, together, send)
        return RequestDone()

    async def _answer_together(self, calls: dict[int, Any], send: Callable[[ToolText], None]) -> None:
        await asyncio.gather(*(self._answer(place, call, send) for place, call in calls.items()))

    async def _answer(self, place: int, call: Any, send: Callable[[ToolText], None]) -> None:
        """Sends the answer of an async call as soon as it is ready, so that a slower call cannot lose it."""
        with _errors_sent(place, send):
            with only_in(self.pid):
                answer = ToolText(place, answer_text(await call), False)
            send(answer)

    def finish(self, completion: list[dict[str, Any]]) -> RequestDone:
        """Returns the environment's state, and its reward if it gives one."""
        method = getattr(self.environment, "get_reward", None)
        try:
            named = signature_of(method).takes({"completion": completion}) if method else ()
            reward = self._run(method, **dict.fromkeys(named, completion)) if method else None
        except (Exception, asyncio.CancelledError) as error:
            return self._lost("get_reward", error)._replace(state=state_of(self.environment))
        try:
            [score] = checked_scores([reward], [0])
        except BadOutputError:
            raise UserError(
                f"'{self.reference}': {type(self.environment).__name__}.get_reward returned {reward!r:.50}; return a "
                "finite number or None"
            ) from None
        return RequestDone(score, state_of(self.environment))

    def _run(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Calls a user function in this process, and awaits it if it is async."""
        with only_in(self.pid):
            result = function(*arguments, **named)
            if inspect.iscoroutine(result):
                result = self.loop.run(result)
        return result

    def _lost(self, method: str, error: BaseException) -> RequestDone:
        if isinstance(error, UserError):
            raise error
        traceback.print_exception(error)
        return RequestDone(lost=f"{method} of '{self.reference}' {self.raised(error)}")


@contextmanager
def _errors_sent(place: int, send: Callable[[ToolText], None]) -> Iterator[None]:
    """Sends an exception as the answer to a call, unless the environment violates the contract."""
    try:
        yield
    except UserError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        send(ToolText(place, error_text(str(error)), True))


def seed_generators(seed: int) -> None:
    """Seeds the global generators of `random` and, if imported, NumPy and PyTorch.

    Args:
        seed: seed of the episode.
    """
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seeds.derive(seed, "numpy") & 0xFFFFFFFF)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def answer_text(value: Any) -> str:
    """The text for the result of a tool or of reset: `str` as in TRL; for content blocks, their text.

    Raises:
        ValueError: a block is not text.
    """
    if isinstance(value, list) and value and all(isinstance(block, dict) and "type" in block for block in value):
        if any(block["type"] != "text" for block in value):
            raise ValueError("an image was returned, and only text can be shown here")
        value = "".join(str(block.get("text", "")) for block in value)
    return _cut(str(value))


def error_text(message: str) -> str:
    """Formats an error as TRL shows it to the model."""
    return _cut(str({"error": message}))


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()  # lone surrogates can be neither tokenized nor stored
    if len(text) <= ANSWER_CHARACTERS:
        return text
    return f"{text[:ANSWER_CHARACTERS]}\n[cut: {len(text)} characters, of which {ANSWER_CHARACTERS} are shown]"


def state_of(environment: Any) -> str | None:
    """The public attributes of an environment as JSON. Rewards read them, as in TRL, through `environments`.

    Attributes that JSON cannot represent, such as a client or NaN, are left out, as are those longer than
    STATE_CHARACTERS. If an episode has not set an attribute, a string, number or None from the class is used: `guesses
    = 0`.
    """
    if environment is None:
        return None
    own = getattr(environment, "__dict__", {})
    of_class = inspect.getmembers_static(type(environment))
    defaults = {name: value for name, value in of_class if isinstance(value, str | int | float | None)}
    parts = dict[str, str]()
    for name, value in sorted((defaults | own).items()):
        if not name.startswith("_"):
            try:
                text = json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                continue
            if len(text) + sum(map(len, parts.values())) <= STATE_CHARACTERS:
                parts[name] = text
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in parts.items()) + "}"
