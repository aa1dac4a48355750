"""Rewards from an HTTP endpoint.

One request carries a few completions: `POST {"prompts": […], "completions": […], COLUMN: […]}`, each list as reward
functions get it. The answer is `{"rewards": […]}` (or `scores`, or the list alone) with one number or null a
completion. Requests that fail in a way that may pass (no connection, too slow, 408, 425, 429, 5xx) are sent again with
growing waits. The reward's own `timeout` in the configuration counts all tries together.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.rewards import endpoint

if TYPE_CHECKING:
    from httpx2 import AsyncClient

WHO = "remote_reward"
PASSING = (408, 425, 429)
LONGEST_WAIT = 60.0
"""Seconds between two tries, at most."""


class PassingError(Exception):
    """A failure that may pass."""


async def remote_reward(
    prompts: list[Any],
    completions: list[Any],
    url: str,
    columns: list[str] | None = None,
    batch_size: int = 16,
    concurrency: int = 8,
    timeout: float = 30.0,
    attempts: int = 5,
    backoff: float = 1.0,
    auth_env: str | None = None,
    auth_header: str = "Authorization",
    auth_scheme: str = "Bearer",
    **row_columns: Any,
) -> list[float | None]:
    """The scores that the endpoint gives; null is None.

    Args:
        prompts: messages or strings, as in the dataset.
        completions: text, or messages of which the last one counts.
        url: where to POST to.
        columns: names of dataset columns to send along.
        batch_size: completions in a request.
        concurrency: requests under way at once, of all calls in a process.
        timeout: seconds until a request counts as failed.
        attempts: tries of a request, the first one included.
        backoff: seconds before the second try, about; they double from try to try, with some chance added.
        auth_env: name of the environment variable with the secret; it is never logged.
        auth_header: header that carries it.
        auth_scheme: word before it in the header; empty for none.
        row_columns: every column of the dataset.

    Raises:
        UserError: the endpoint cannot be reached, refuses, or gives something else than one number or null each.
    """
    import httpx2

    shown = endpoint.checked_url(WHO, url)
    secret = endpoint.secret_of(WHO, "auth_env", auth_env)
    for name in columns or []:
        if name not in row_columns:
            raise UserError(f"{WHO}: the dataset has no column '{name}' (columns){did_you_mean(name, row_columns)}")
    headers = {auth_header: f"{auth_scheme} {secret}".strip()} if secret else {}
    rows = {"prompts": prompts, "completions": completions} | {name: row_columns[name] for name in columns or []}
    endpoint.quiet()
    key = (WHO, url, auth_header, auth_scheme, auth_env, timeout, concurrency)
    make = partial(httpx2.AsyncClient, headers=headers, timeout=timeout)
    async with endpoint.line(key, concurrency, make, "aclose") as line:

        async def scored(start: int) -> list[float | None]:
            part = {name: values[start : start + batch_size] for name, values in rows.items()}
            async with line.at_once:
                answer = await _asked(line.client, url, part, timeout, attempts, backoff, shown, secret)
            return _scores(answer, len(part["completions"]), start, shown, secret)

        parts = await endpoint.all_of([scored(start) for start in range(0, len(completions), batch_size)])
    return [score for part in parts for score in part]


async def _asked(
    client: AsyncClient,
    url: str,
    part: dict[str, list[Any]],
    timeout: float,
    attempts: int,
    backoff: float,
    shown: str,
    secret: str | None,
) -> Any:
    """What the endpoint answers to one request, tried again where a failure may pass."""
    import tenacity

    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential_jitter(multiplier=backoff, max=LONGEST_WAIT, jitter=backoff),
        retry=tenacity.retry_if_exception_type(PassingError),
        reraise=True,
    )
    try:
        async for attempt in retrying:
            with attempt:
                return await _once(client, url, part, timeout, shown, secret)
    except PassingError as error:
        raise UserError(
            f"{WHO}: {shown} failed {attempts} times, last with {error}; see that the server is up, or raise timeout "
            "or attempts"
        ) from None
    raise AssertionError("tenacity ends by a result or an error")


async def _once(
    client: AsyncClient, url: str, part: dict[str, list[Any]], timeout: float, shown: str, secret: str | None
) -> Any:
    import httpx2

    try:
        async with asyncio.timeout(timeout):  # httpx counts each read; a server that drips would take for ever
            response = await client.post(url, json=part)
    except TimeoutError:
        raise PassingError(f"no answer within {timeout:g} s") from None
    except httpx2.TransportError as error:
        raise PassingError(f"{type(error).__name__} {endpoint.without(secret, error)}".strip()) from None
    if response.status_code in PASSING or response.status_code >= 500:
        raise PassingError(f"status {response.status_code}")
    if response.status_code != 200:
        raise UserError(
            f"{WHO}: {shown} refused with status {response.status_code} ({endpoint.without(secret, response.text)}); "
            "see url and auth_env"
        )
    try:
        return response.json()
    except ValueError:
        text = endpoint.without(secret, response.text)
        raise UserError(f"{WHO}: {shown} answered something else than JSON ({text})") from None


def _scores(answer: Any, count: int, start: int, shown: str, secret: str | None) -> list[float | None]:
    """The scores in an answer, once there is one finite number or null a completion."""
    given = answer.get("rewards", answer.get("scores")) if isinstance(answer, dict) else answer
    if not isinstance(given, list) or len(given) != count:
        what = f"{len(given)} scores" if isinstance(given, list) else endpoint.without(secret, answer)
        raise UserError(f"{WHO}: {shown} answered {what} for {count} completions; it must be a list of one number each")
    for place, value in enumerate(given):
        number = isinstance(value, int | float) and math.isfinite(value)
        if not (value is None or number):
            what = endpoint.without(secret, repr(value))
            raise UserError(f"{WHO}: {shown} gave {what} for row {start + place}, not a finite number or null")
    return [None if value is None else float(value) for value in given]
