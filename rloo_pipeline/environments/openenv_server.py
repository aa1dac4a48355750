"""Environments of OpenEnv: `rollout.environment: "openenv:http://node:8000"`, or the command that starts their server,
such as `"openenv:envs/echo/bin/uvicorn echo_env.server.app:app --port {port}"`.

The process from which episodes are forked starts the server, on the loopback interface unless the command says
otherwise, and ends it; its output goes to the stage's log. Each episode opens its own WebSocket, and so its own
session (`/ws`: https://github.com/meta-pytorch/OpenEnv). This file needs `websockets`, but not OpenEnv.

If the environment is an MCP environment, the model gets its tools. Any other gives the model one tool, `step`, with the
fields of the action as arguments. `reset` gets the columns of the row, a `seed` drawn for the row, and an `episode_id`
made from that seed; OpenEnv passes on those that the environment's `reset` names. The reward is the sum over all steps.
"""

import json
import os
import random
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.process import OF_THIS_PYTHON
from rloo_pipeline.user_code.worker import die_with

START_SECONDS = 300.0
"""Time limit for the start of a server."""
CAPACITY_SECONDS = 10.0
"""Seconds that an episode waits for a session; the server frees those of ended episodes within milliseconds."""
MOST_BYTES = 100 << 20
"""Maximum size of a message in bytes, as in OpenEnv's own client."""
MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action's schema in environments whose actions are MCP tool calls."""
OF_MODEL = ("EXECUTION_ERROR", "VALIDATION_ERROR")
"""Errors that are passed to the model as the answer to its call: the environment raised, or the arguments are wrong."""
_claims: list[socket.socket] = []
"""Abstract sockets named after our ports; the kernel frees them when this process ends."""


class OpenEnvSession:
    """An episode, with one method for each tool."""

    _url, _has_tools = "", False

    def __init__(self) -> None:
        self.steps, self.done = 0, False
        self.observation: dict[str, Any] = {}
        self._reward = 0.0
        self._socket: Any = None

    def reset(self, /, **row: Any) -> str:
        """Opens a session and resets its environment.

        Args:
            row: the columns of the prompt's row.

        Raises:
            UserError: the server has no session left, or does not answer like an OpenEnv server.
        """
        seed = random.getrandbits(31)
        message = {"type": "reset", "data": {"seed": seed, "episode_id": f"{seed:08x}", **row}}
        end = time.monotonic() + CAPACITY_SECONDS
        while True:
            self._socket = _connect(self._url)
            with suppress(_NoSessionError):
                return self._store_result(_ask(self._url, self._socket, message))
            self._socket.close()
            if time.monotonic() > end:
                raise UserError(
                    f"rollout.environment: {self._url} has no session left for another episode; allow it "
                    "rollout.environment_workers sessions (OpenEnv's max_concurrent_envs), or lower that key"
                )
            time.sleep(0.02)

    def _step(self, action: Mapping[str, Any]) -> str:
        if self.done:
            raise ValueError("the episode has ended")
        self.steps += 1
        return self._store_result(_ask(self._url, self._socket, {"type": "step", "data": action}))

    def _store_result(self, result: Mapping[str, Any]) -> str:
        """Stores the result of a step and returns its text."""
        self._reward += result["reward"] or 0.0
        self.done = result["done"]
        self.observation = {name: value for name, value in result["observation"].items() if name != "metadata"}
        return _text(self.observation)

    def get_reward(self) -> float:
        """The sum of the rewards of all steps."""
        return self._reward


class _NoSessionError(Exception):
    """All sessions are taken."""


def environment(argument: str) -> type:
    """The class of the environment behind a URL, or behind the server that a command starts.

    Args:
        argument: the URL, or the command with `{port}` in it.

    Raises:
        UserError: the server cannot be started, or does not answer like an OpenEnv server.
    """
    url = argument.rstrip("/")
    if not url.startswith(("http://", "https://")):
        url = _start(argument)
    schema = _get(url, "/schema").get("action")
    if not isinstance(schema, dict):
        raise _unexpected_answer(url, schema)
    if schema.get("title") in MCP_ACTIONS:
        connection = _connect(url)
        tools = _ask(url, connection, {"type": "step", "data": {"type": "list_tools"}})["observation"].get("tools")
        connection.close()
        if not tools:
            raise UserError(f"rollout.environment: {url} lists no tools, so the model has nothing to call")
        schemas = [{**one, "parameters": one["input_schema"]} for one in tools]
    else:
        about = _get(url, "/metadata").get("description") or "Takes a step."
        fields = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        schemas = [{"name": "step", "description": about, "parameters": {**schema, "properties": fields}}]
    keys = ("name", "description", "parameters")
    methods = {one["name"]: (_method(one["name"]), {key: one[key] for key in keys}) for one in schemas}
    return contract.with_tools(OpenEnvSession, methods, _url=url, _has_tools=schema.get("title") in MCP_ACTIONS)


def _method(name: str) -> Callable[..., str]:
    def method(self: OpenEnvSession, /, **arguments: Any) -> str:
        call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return self._step(call if self._has_tools else arguments)

    return method


def _start(command: str) -> str:
    """Starts a server that dies with this process, and returns its URL once it answers."""
    if "{port}" not in command:
        raise UserError(
            f"rollout.environment: 'openenv:{command}' is neither an http:// address nor a command with {{port}}; "
            "write {port} where the command takes the server's port"
        )
    port = _free_port()
    argv = [part.replace("{port}", str(port)) for part in shlex.split(command)]
    inherited = {name: value for name, value in os.environ.items() if name not in OF_THIS_PYTHON}
    parent = os.getpid()
    try:
        server = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, env=inherited, start_new_session=True, preexec_fn=lambda: die_with(parent)
        )
    except OSError as error:
        raise UserError(f"rollout.environment: {argv[0]} cannot be started ({error.strerror}); correct it") from None
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < end:
        with suppress(OSError, UserError):
            _get(url, "/health")
            return url
        time.sleep(0.05)
    state = f"ended with exit code {server.returncode}" if server.returncode is not None else "does not answer"
    raise UserError(
        f"rollout.environment: the server started by '{argv[0]}' {state}; its output is in the log, and the command "
        f"was: {shlex.join(argv)}"
    )


def _free_port() -> int:
    """A free port that no other process of ours picks while the server starts. Otherwise another server could answer
    our health check.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        claim = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            claim.bind(f"\0rloo-port-{port}")
            _claims.append(claim)
            return port
        claim.close()


def _get(url: str, path: str) -> dict[str, Any]:
    """The JSON object at a path of the server.

    Raises:
        UserError: the server cannot be reached, or is not an OpenEnv server.
    """
    try:
        with build_opener(ProxyHandler({})).open(url + path, timeout=30.0) as response:
            answer = json.load(response)
    except (OSError, HTTPException) as error:
        raise UserError(f"rollout.environment: {url}{path} cannot be read ({error}); start the server there") from None
    except ValueError as error:
        raise _unexpected_answer(url, error) from None
    if not isinstance(answer, dict):
        raise _unexpected_answer(url, answer)
    return answer


def _connect(url: str) -> Any:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    try:
        address = f"ws{url.removeprefix('http')}/ws"
        return connect(address, max_size=MOST_BYTES, ping_interval=None, proxy=None, open_timeout=60.0).__enter__()
    except (OSError, WebSocketException) as error:
        raise _connection_lost(url, error) from None


def _ask(url: str, connection: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a message and returns the result: `observation`, `reward` and `done`.

    Raises:
        UserError: the connection is lost, or the server does not answer like an OpenEnv server.
        ValueError: the environment raised, or the arguments are wrong.
    """
    from websockets.exceptions import ConnectionClosed

    try:
        with suppress(ConnectionClosed):  # a server that has no session left says so and closes
            connection.send(json.dumps(message, default=str))
        text = connection.recv()
    except ConnectionClosed as error:
        raise _connection_lost(url, error) from None
    try:
        answer = json.loads(text)
        kind, data = answer["type"], answer["data"]
        if kind == "error" and data["code"] == "CAPACITY_REACHED":
            raise _NoSessionError
        if kind == "error" and data["code"] in OF_MODEL:
            raise ValueError(_of_fields(data))
        result: dict[str, Any] = {"reward": None, "done": False, **data}
        fits = kind == "observation" and isinstance(result["observation"], dict)
        if not fits or not isinstance(result["done"], bool) or not isinstance(result["reward"], int | float | None):
            raise TypeError
    except (json.JSONDecodeError, KeyError, TypeError):
        raise _unexpected_answer(url, text) from None
    return result


def _of_fields(data: Mapping[str, Any]) -> str:
    """The message of an error, with the fields of the action that are wrong."""
    wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ())]
    return "; ".join(wrong) or str(data["message"])


def _text(observation: Mapping[str, Any]) -> str:
    """The observation as text for the model: the result of an MCP tool, the only string in it, or JSON.

    Raises:
        ValueError: a tool failed.
    """
    if {"tool_name", "result"} <= observation.keys():
        if error := observation.get("error"):
            raise ValueError(error["message"])
        result = observation["result"]
        if not isinstance(result, dict) or "content" not in result:
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        text = "".join(block.get("text", "") for block in result["content"])
        if result.get("is_error"):
            raise ValueError(text)
        return text
    values = list(observation.values())
    if not values or (len(values) == 1 and isinstance(values[0], str)):
        return "".join(values)
    return json.dumps(observation, ensure_ascii=False)


def _connection_lost(url: str, error: object) -> UserError:
    return UserError(
        f"rollout.environment: lost the connection to the server at {url} ({error}); if the run starts it, its output "
        "is in the log; run the stage again"
    )


def _unexpected_answer(url: str, answer: object) -> UserError:
    return UserError(
        f"rollout.environment: {url} does not answer like an OpenEnv server ({answer!r:.120}); correct the address, or "
        "install another version of openenv there"
    )
