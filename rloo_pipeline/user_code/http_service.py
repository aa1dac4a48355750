"""Helpers for rewards that call an HTTP service: URL checks, secrets, a shared client, errors that hide the secret."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rloo_pipeline.errors import UserError, one_line

if TYPE_CHECKING:
    import httpx2
    from httpx2 import AsyncClient

T = TypeVar("T")
HIDDEN = "[secret]"
REFUSED_CONTENT = (400, 413, 422)
"""Status codes by which a service refuses the content of a request, such as a completion that is too long."""


MOST_BYTES = 4 << 20
"""Maximum decompressed size of a response. 1,000 scores take 20 kB, a reply of 32,000 tokens 150 kB."""


class TooLongError(Exception):
    """A response is longer than `MOST_BYTES`."""


class RefusedContentError(Exception):
    """A service refused the content of a request. The message is phrased to follow the function's name."""


class SharedClient(NamedTuple):
    """An HTTP client that concurrent calls share, and the limit on its concurrent requests."""

    client: Any
    limit: asyncio.Semaphore
    users: set[object]


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, SharedClient]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_client(key: Hashable, concurrency: int, make: Callable[[], Any]) -> AsyncIterator[SharedClient]:
    """Yields the client for `key`, which all concurrent calls in this event loop share.

    One limit therefore holds for all calls, and connections are reused. The last call closes the client.

    Args:
        key: everything that the client depends on.
        concurrency: maximum number of concurrent requests.
        make: creates the client.
    """
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    user = object()
    if key not in clients:
        clients[key] = SharedClient(make(), asyncio.Semaphore(concurrency), set())
    shared = clients[key]
    shared.users.add(user)
    try:
        yield shared
    finally:
        shared.users.discard(user)
        if not shared.users:
            del clients[key]
            await shared.client.close()


def bounded(client: type[AsyncClient], seconds: float) -> type[AsyncClient]:
    """A client class that limits the total time and size of a request. httpx limits only each read, so a slow trickle
    would never time out.

    Raises:
        TooLongError: from a request whose response has more than `MOST_BYTES`.
        httpx2.ReadTimeout: from a request that takes more than `seconds`.
    """
    import httpx2

    class BoundedClient(client):  # type: ignore[misc, valid-type]
        async def send(self, request: httpx2.Request, **kwargs: Any) -> httpx2.Response:
            content = bytearray()
            try:
                async with asyncio.timeout(seconds):
                    response: httpx2.Response = await super().send(request, **kwargs | {"stream": True})
                    async with aclosing(response):
                        async for part in response.aiter_bytes(1 << 16):
                            content += part
                            if len(content) > MOST_BYTES:
                                raise TooLongError(f"an answer of more than {MOST_BYTES >> 20} MiB")
            except TimeoutError:
                raise httpx2.ReadTimeout(f"no whole answer within {seconds:g} s", request=request) from None
            headers = [
                (n, v) for n, v in response.headers.multi_items() if n not in ("content-encoding", "content-length")
            ]
            return httpx2.Response(response.status_code, headers=headers, content=bytes(content), request=request)

    return BoundedClient


def checked_url(reward: str, url: str) -> str:
    """Checks a URL and returns it without its query, for messages.

    Raises:
        UserError: it is not an http(s) URL, or it contains a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its message may contain a password
        raise UserError(f"{reward}: the address has no valid host and port; correct it") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{reward}: the address '{parts.scheme}://{parts.hostname or ''}' must begin with http:// or https://"
        )
    if parts.username or parts.password:
        raise UserError(
            f"{reward}: the address of {parts.hostname} has a user name or password in it; remove it and name an "
            "environment variable with a token instead"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def secret_of(reward: str, option: str, variable: str | None) -> str | None:
    """Reads the secret in an environment variable; None if `variable` is None.

    Raises:
        UserError: the variable is empty or not set, or its value cannot be sent in a header.
    """
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise UserError(
            f"{reward}: the environment variable {variable} ({option}) is not set; export it before the run"
        )
    if not (secret.isascii() and secret.isprintable()):
        raise UserError(
            f"{reward}: the environment variable {variable} ({option}) holds characters that a header cannot carry"
        )
    return secret


def without(secret: str | None, text: object) -> str:
    """Makes a text safe for a message: a single line, with the secret replaced."""
    return one_line(str(text).replace(secret, HIDDEN) if secret else text)


def quiet_clients() -> None:
    """Silences the clients' loggers, which log the whole URL of each request."""
    for name in ("httpx2", "httpcore2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def gather(requests: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs requests concurrently and returns the results in order.

    The first failure cancels the rest and is raised as it is, not inside an ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
