"""Rewards from an HTTP endpoint.

A request carries several completions: `POST {"prompts": […], "completions": […], COLUMN: […]}`, with each list as
reward functions get it. The answer is `{"rewards": […]}` (or `scores`, or the list alone) with one number or null per
completion. Transient failures (no connection, timeout, 408, 425, 429, 5xx) are retried with growing waits. The
`timeout` of the reward in the configuration covers all attempts together. A request that is refused with 400, 413 or
422 is repeated in halves. A completion that is refused alone gets an entry in the column `error`, and 0 (or the lowest
score of the same prompt's completions, if that is below 0); it gets None if all completions of its prompt are refused.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.user_code import http_service
from rloo_pipeline.user_code.reward_call import score_refused

if TYPE_CHECKING:
    from httpx2 import AsyncClient

REWARD = "remote_reward"
TRANSIENT_STATUS = (408, 425, 429)
LONGEST_WAIT = 60.0
"""Longest time between two attempts, in seconds."""


class TransientError(Exception):
    """A failure that a retry may overcome."""


class Target(NamedTuple):
    """Target and options of requests."""

    url: str
    shown_url: str
    """The URL as messages show it."""
    secret: str | None
    timeout: float
    attempts: int
    backoff: float


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
    """The scores that the endpoint returns; None where it returns null or refuses all completions of a prompt.

    Args:
        prompts: messages or strings, as in the dataset.
        completions: strings, or lists of messages; the last message counts.
        url: URL to POST to.
        columns: names of dataset columns to send as well.
        batch_size: completions per request.
        concurrency: most concurrent requests of all calls in a process.
        timeout: seconds after which a request fails.
        attempts: attempts per request, including the first.
        backoff: approximate seconds before the second attempt; the wait doubles each time, with random jitter.
        auth_env: name of the environment variable with the secret; the secret is never logged.
        auth_header: header that carries the secret.
        auth_scheme: word before the secret in the header; empty for none.
        row_columns: every column of the dataset.

    Raises:
        UserError: the endpoint cannot be reached, refuses, or does not return one number or null per completion.
    """
    import httpx2

    shown_url = http_service.checked_url(REWARD, url)
    secret = http_service.secret_of(REWARD, "auth_env", auth_env)
    for name in columns or []:
        if name not in row_columns:
            hint = did_you_mean(name, row_columns)
            raise UserError(f"{REWARD}: the dataset has no column '{name}' (columns){hint}")
    headers = {auth_header: f"{auth_scheme} {secret}".strip()} if secret else {}
    rows = {"prompts": prompts, "completions": completions} | {name: row_columns[name] for name in columns or []}
    target = Target(url, shown_url, secret, timeout, attempts, backoff)
    http_service.quiet_clients()
    key = (REWARD, url, auth_header, auth_scheme, auth_env, timeout, concurrency)
    make = partial(http_service.bounded(httpx2.AsyncClient, timeout), headers=headers, timeout=timeout)
    refused: dict[int, str] = {}
    async with http_service.shared_client(key, concurrency, make, "aclose") as shared:

        async def scores_of(places: range) -> list[float | None]:
            body = {name: values[places.start : places.stop] for name, values in rows.items()}
            try:
                async with shared.limit:
                    answer = await _post_with_retries(shared.client, body, target)
            except http_service.RefusedContentError as refusal:
                half = len(places) // 2
                if half:
                    return [*await scores_of(places[:half]), *await scores_of(places[half:])]
                refused[places.start] = str(refusal)
                return [None]
            return _scores(answer, len(places), target)

        places = range(len(completions))
        requests = [scores_of(places[start : start + batch_size]) for start in places[::batch_size]]
        parts = await http_service.gather(requests)
    return score_refused([score for part in parts for score in part], refused, prompts)


async def _post_with_retries(client: AsyncClient, body: dict[str, list[Any]], target: Target) -> Any:
    import tenacity

    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(target.attempts),
        wait=tenacity.wait_exponential_jitter(multiplier=target.backoff, max=LONGEST_WAIT, jitter=target.backoff),
        retry=tenacity.retry_if_exception_type(TransientError),
        reraise=True,
    )
    try:
        return await retrying(_post, client, body, target)
    except TransientError as error:
        raise UserError(
            f"{REWARD}: {target.shown_url} failed {target.attempts} times, last with {error}; check that the server "
            "runs, or raise timeout or attempts"
        ) from None


async def _post(client: AsyncClient, body: dict[str, list[Any]], target: Target) -> Any:
    import httpx2

    secret = target.secret
    try:
        response = await client.post(target.url, json=body)
    except http_service.TooLongError as error:
        raise UserError(f"{REWARD}: {target.shown_url} sent {error} for scores; check url and the server") from None
    except httpx2.RequestError as error:
        raise TransientError(f"{type(error).__name__} {http_service.without(secret, error)}".strip()) from None
    if response.status_code in TRANSIENT_STATUS or response.status_code >= 500:
        raise TransientError(f"status {response.status_code}")
    if response.status_code != 200:
        status = f"with status {response.status_code} ({http_service.without(secret, response.text)})"
        if response.status_code in http_service.REFUSED_CONTENT:
            raise http_service.RefusedContentError(f"was refused by {target.shown_url} {status}")
        raise UserError(f"{REWARD}: {target.shown_url} refused {status}; check url and auth_env")
    try:
        return response.json()
    except (ValueError, RecursionError):
        text = http_service.without(secret, response.text)
        raise UserError(
            f"{REWARD}: {target.shown_url} did not answer with JSON ({text}); check url and the server"
        ) from None


def _scores(answer: Any, count: int, target: Target) -> list[float | None]:
    """The scores in an answer, after a check for one finite number or null per completion."""
    values = answer.get("rewards", answer.get("scores")) if isinstance(answer, dict) else answer
    if not isinstance(values, list) or len(values) != count:
        shown = f"{len(values)} scores" if isinstance(values, list) else http_service.without(target.secret, answer)
        raise UserError(
            f"{REWARD}: {target.shown_url} answered {shown} for {count} completions; it must return a list with one "
            "number or null each"
        )
    for value in values:
        number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        if not (value is None or number):
            shown = http_service.without(target.secret, repr(value))
            raise UserError(
                f"{REWARD}: {target.shown_url} returned {shown} for a completion; it must return a finite number or "
                "null"
            )
    return [None if value is None else float(value) for value in values]
