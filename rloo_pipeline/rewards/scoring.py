"""Calling reward functions and checking what they give back.

A function is called once with all completions of a table. Without `**kwargs` it gets only the arguments that it names.
What it returns must be one finite number or None a completion; everything else is an error that names the function and
the row.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_pipeline import references
from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.progress import say

OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")


class Batch(NamedTuple):
    """What reward functions see: one entry a completion in each list."""

    prompts: list[Any]
    """Messages or strings, as in the dataset."""
    completions: list[Any]
    """One assistant message in a list where the prompt is messages, else a string (TRL's convention)."""
    completion_ids: list[list[int]]
    columns: Mapping[str, list[Any]]
    """Every dataset column."""


def score(reward: Reward, batch: Batch) -> list[float | None]:
    """One score a completion from one reward function.

    Raises:
        UserError: the function cannot be found, asks for a column that is not there, raises, or returns something else
        than
            one finite number or None a completion.
    """
    function = references.load(reward.function)
    arguments = _arguments(function, reward, batch)
    try:
        given = function(**arguments)
        if inspect.isawaitable(given):
            given = asyncio.run(_await(given))
    except Exception as error:
        raise UserError(
            f"reward '{reward.column}' ({reward.function}) raised {type(error).__name__}: {error}"
        ) from error
    scores = _checked(reward, given, len(batch.completions))
    known = [value for value in scores if value is not None]
    say(
        f"reward {reward.column}: mean {sum(known) / len(known) if known else math.nan:.4f} "
        f"over {len(known)} of {len(scores)}"
    )
    return scores


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _arguments(function: Callable[..., Any], reward: Reward, batch: Batch) -> dict[str, Any]:
    """What the function is called with: by name, only what it takes."""
    offered = {**batch.columns, **dict(zip(OWN_ARGUMENTS, batch[:3], strict=True)), **reward.options}
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.name not in offered and parameter.default is parameter.empty:
            near = did_you_mean(parameter.name, offered) or f"; there are {', '.join(sorted(offered))}"
            raise UserError(
                f"reward '{reward.column}' ({reward.function}) needs a column "
                f"'{parameter.name}', which the dataset lacks{near}"
            )
    for option in reward.options:
        if option not in (names := [p.name for p in named]):
            raise UserError(
                f"reward '{reward.column}' ({reward.function}) takes no option '{option}'{did_you_mean(option, names)}"
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    return {p.name: offered[p.name] for p in named if p.name in offered}


def _checked(reward: Reward, given: Any, count: int) -> list[float | None]:
    """What the function returned, once it is a list of the right length of finite numbers and None."""
    who = f"reward '{reward.column}' ({reward.function})"
    if not isinstance(given, Sequence) and hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UserError(f"{who} returned {type(given).__name__}, not a list with one number or None a completion")
    if len(given) != count:
        raise UserError(f"{who} returned {len(given)} scores for {count} completions")
    scores: list[float | None] = []
    for row, value in enumerate(given):
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            raise UserError(f"{who} returned {value!r} for row {row}, not a number or None") from None
        if number is not None and not math.isfinite(number):
            raise UserError(f"{who} returned {number} for row {row}; return None where a completion cannot be scored")
        scores.append(number)
    return scores


def text_of(completion: Any) -> str:
    """The text of a completion in either of TRL's forms: a string, or a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
