"""Scores a batch of completions with reward functions, in worker processes that can be killed.

A reward function is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async (TRL's
convention). Without `**kwargs` it gets only the arguments that it names. `tokenizer_path`, the folder of the policy's
tokenizer, is passed only to functions that name it. A function must return one finite number or None per completion;
anything else is an error that names the function and the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.scoring.job import FunctionScores, TableRows
from rloo_pipeline.scoring.reward_call import OWN_ARGUMENTS

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward
    from rloo_pipeline.scoring.dispatch import WorkerPools


class RewardBatch(NamedTuple):
    """The inputs of reward functions: lists with one entry per completion."""

    prompts: list[Any]
    """Messages or strings, as in the dataset."""
    completions: list[Any]
    """A list with one assistant message where the prompt is messages, else a string (TRL's convention)."""
    completion_ids: list[list[int]] | None
    """Token ids; None where there are none, and then no function gets them."""
    columns: Mapping[str, list[Any]]
    """Every dataset column."""


def score_all(
    rewards: Sequence[Reward],
    batch: RewardBatch,
    samples: Sequence[int],
    workers: int,
    constants: Mapping[str, Any] = MappingProxyType({}),
) -> list[FunctionScores]:
    """Scores all rows with every function, and logs a summary line for each.

    Args:
        rewards: the functions.
        batch: the rows.
        samples: number of neighbouring rows of each prompt; they share a call.
        workers: processes that compute at a time; changes no score.
        constants: further arguments, the same for all rows, for functions that name them; options override them.

    Raises:
        UserError: a function cannot be found, needs a column that does not exist, or does not return one finite number
            or None per completion; or it fails or takes too long where `on_error` or `on_timeout` is `fail`.
    """
    from rloo_pipeline.scoring.dispatch import WorkerPools

    with WorkerPools(rewards, workers) as pools:
        results = score_with(pools, batch, samples, constants)
    for reward, result in zip(rewards, results, strict=True):
        log_summary(reward, result)
    return results


def score_with(
    pools: WorkerPools,
    batch: RewardBatch,
    samples: Sequence[int],
    constants: Mapping[str, Any] = MappingProxyType({}),
    more: bool = False,
) -> list[FunctionScores]:
    """The scores of `score_all` from workers that are already started; with `more` they can score another batch."""
    from rloo_pipeline.runtime.progress import counting

    own = {name: values for name, values in zip(OWN_ARGUMENTS, batch[:3], strict=True) if values is not None}
    offered = {**batch.columns, **own}
    with counting("scores", len(pools.rewards) * len(batch.completions)) as counter:
        return pools.run(TableRows(offered, samples, constants, counter.advance), more)


def log_summary(reward: Reward, result: FunctionScores) -> None:
    """Logs one line: the mean score and how many rows have none."""
    from rloo_pipeline.runtime.progress import say

    values = [value for value in result.scores if value is not None]
    mean = sum(values) / len(values) if values else math.nan
    line = f"reward {reward.column}: mean {mean:.4f} over {len(values)} of {len(result.scores)}"
    for outcome, rows in (("failed", result.errors), ("could not be scored", result.notes)):
        if reasons := [text for text in rows if text]:
            line += f"; {len(reasons)} {outcome}, the first: {reasons[0]}"
    say(line)
