"""Scoring a table with reward functions, in worker processes that can be killed.

A function is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async: TRL's
convention. Without `**kwargs` it gets only the arguments that it names; `tokenizer_path`, the folder of the policy's
tokenizer, only where it names that. What it returns must be one finite number or
None a completion; everything else is an error that names the function and the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.scoring.calls import OWN_ARGUMENTS, Scores

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward
    from rloo_pipeline.scoring.schedule import WorkerPools


class Batch(NamedTuple):
    """What reward functions see: one entry a completion in each list."""

    prompts: list[Any]
    """Messages or strings, as in the dataset."""
    completions: list[Any]
    """One assistant message in a list where the prompt is messages, else a string (TRL's convention)."""
    completion_ids: list[list[int]] | None
    """None where there are none: then no function gets them."""
    columns: Mapping[str, list[Any]]
    """Every dataset column."""


class Scored(NamedTuple):
    """What one function made of a table, row by row."""

    scores: Scores
    errors: list[str | None]
    """Why a row has no score, where it took too long or failed."""
    notes: list[str | None]
    """Why a row has no score, where the function said so itself (`calls.unscored`)."""
    seconds: list[float]
    """A row's share of the wall time of its calls."""


def score_all(
    rewards: Sequence[Reward],
    batch: Batch,
    samples: Sequence[int],
    workers: int,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> list[Scored]:
    """Scores of all rows by every function.

    Args:
        rewards: the functions.
        batch: the table.
        samples: how many neighbouring rows each prompt has; they are in one call.
        workers: processes that compute at a time; changes no score.
        facts: further arguments, the same for all rows, for functions that name them; options win.

    Raises:
        UserError: a function cannot be found, asks for a column that is not there, or returns something else than one
            finite number or None a completion; or it fails or takes too long, and its policy is `fail`.
    """
    from rloo_pipeline.scoring.schedule import WorkerPools

    with WorkerPools(rewards, workers) as crews:
        found = score_with(crews, batch, samples, facts)
    for reward, scored in zip(rewards, found, strict=True):
        tell(reward, scored)
    return found


def score_with(
    crews: WorkerPools,
    batch: Batch,
    samples: Sequence[int],
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> list[Scored]:
    """The same by functions whose workers were started before, and are used up then."""
    from rloo_pipeline.runtime.progress import counting

    own = {name: values for name, values in zip(OWN_ARGUMENTS, batch[:3], strict=True) if values is not None}
    offered = {**batch.columns, **own}
    with counting("scores", len(crews.rewards) * len(batch.completions)) as counter:
        for job in crews.jobs:
            job.add(offered, samples, facts, counter.advance)
        crews.run()
    return [Scored(job.scores, job.errors, job.notes, job.seconds) for job in crews.jobs]


def tell(reward: Reward, scored: Scored) -> None:
    """One line on what a function gave."""
    from rloo_pipeline.runtime.progress import say

    known = [value for value in scored.scores if value is not None]
    mean = sum(known) / len(known) if known else math.nan
    line = f"reward {reward.column}: mean {mean:.4f} over {len(known)} of {len(scored.scores)}"
    for what, rows in (("failed", scored.errors), ("could not be scored", scored.notes)):
        if said := [text for text in rows if text]:
            line += f"; {len(said)} {what}, the first: {said[0]}"
    say(line)


def score(reward: Reward, batch: Batch) -> Scores:
    """One score a completion from one reward function; each row is a prompt of its own."""
    return score_all([reward], batch, [1] * len(batch.completions), 1)[0].scores


def text_of(completion: Any) -> str:
    """The text of a completion in either of TRL's forms: a string, or a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
