"""What rewards that ask a server share: its address, its secret, and errors that do not tell the secret."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from rloo_pipeline.errors import UserError

T = TypeVar("T")
HIDDEN = "[secret]"


class Line(NamedTuple):
    """A client, and how many of its requests may be under way."""

    client: Any
    at_once: asyncio.Semaphore
    users: set[object]


_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Line]] = WeakKeyDictionary()


@asynccontextmanager
async def line(key: Hashable, concurrency: int, make: Callable[[], Any], close: str) -> AsyncIterator[Line]:
    """The client for what `key` says, which all calls that are under way in this process share: one limit holds for all
    of them, and connections are kept. It is closed with the last of them.
    """
    lines = _lines.setdefault(asyncio.get_running_loop(), {})
    user = object()
    if key not in lines:
        lines[key] = Line(make(), asyncio.Semaphore(concurrency), set())
    found = lines[key]
    found.users.add(user)
    try:
        yield found
    finally:
        found.users.discard(user)
        if not found.users:
            del lines[key]
            await getattr(found.client, close)()


def checked_url(who: str, url: str) -> str:
    """The address without its query, for messages.

    Raises:
        UserError: it is no http address, or has a password in it.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{who}: the address '{parts.scheme}://{parts.hostname or ''}' must begin with http:// or https://"
        )
    if parts.username or parts.password:
        raise UserError(
            f"{who}: the address of {parts.hostname} has a user name or password in it; take it out and name an "
            "environment variable with a token instead"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def secret_of(who: str, option: str, variable: str | None) -> str | None:
    """The secret in an environment variable; None where none is named.

    Raises:
        UserError: the variable is empty or not set, or holds what no header can carry.
    """
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise UserError(f"{who}: the environment variable {variable} ({option}) is not set; export it before the run")
    if not (secret.isascii() and secret.isprintable()):
        raise UserError(
            f"{who}: the environment variable {variable} ({option}) holds characters that no header can carry"
        )
    return secret


def without(secret: str | None, text: object, longest: int = 200) -> str:
    """A short text for a message, in one line, with the secret blotted out."""
    line = " ".join(str(text).split())
    return (line.replace(secret, HIDDEN) if secret else line)[:longest]


def quiet() -> None:
    """Keeps the clients' own lines (one a request, with the whole address) out of the log."""
    for name in ("httpx2", "httpcore2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def all_of(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first failure ends the rest and comes out as itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
