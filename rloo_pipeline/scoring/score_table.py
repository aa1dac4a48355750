"""A table of rollouts → a table of scores: a column a reward function, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import policy, tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.scoring.calls import OWN_ARGUMENTS
from rloo_pipeline.scoring.schedule import WorkerPools
from rloo_pipeline.scoring.scoring import Batch, score_with, tell


class Column(NamedTuple):
    """What one function made of a table, row by row."""

    scores: list[float | None]
    seconds: list[float]
    errors: list[str | None]


def score_table(config: Config, rolled: pa.Table, prompts: PromptSet, policy_folder: Path) -> pa.Table:
    """The scores of a table of rollouts by all functions, row by row, and their weighted sum."""
    if any(reward.gpus for reward in config.rewards):
        devices.free_gpu()  # where a sampler of this process is on it
    with WorkerPools(config.rewards, config.scoring.workers) as crews:
        columns = score_columns(crews, rolled, prompts, policy_folder)
    return join(config.rewards, rolled, columns)


def score_columns(crews: WorkerPools, rolled: pa.Table, prompts: PromptSet, policy_folder: Path) -> dict[str, Column]:
    """What each function gives, by its name, and a line on each for the person.

    Args:
        crews: the functions, whose processes are started.
        rolled: the rollouts.
        prompts: the prompt set that they were sampled from, whose columns the functions see.
        policy_folder: a policy with the tokenizer of those that sampled.
    """
    facts = {"tokenizer_path": str(policy.base_of(policy_folder))}
    samples = [sum(1 for _ in same) for _, same in groupby(rolled["prompt_id"].to_pylist())]
    scored = score_with(crews, batch_of(rolled, prompts), samples, facts)
    for reward, one in zip(crews.rewards, scored, strict=True):
        tell(reward, one)
    return {
        reward.column: Column(one.scores, one.seconds, _one_text(one.errors, one.notes))
        for reward, one in zip(crews.rewards, scored, strict=True)
    }


def join(rewards: Sequence[Reward], rolled: pa.Table, columns: Mapping[str, Column]) -> pa.Table:
    """The table of scores: a column a function, in the order of the configuration, and their weighted sum."""
    scores = {reward.column: columns[reward.column].scores for reward in rewards}
    total = pa.array(_totals(rewards, list(scores.values())), from_pandas=True)  # NaN is null
    made = as_table(
        rolled,
        tables.scores_schema(list(scores)),
        {**scores, "reward": total},
        [columns[reward.column] for reward in rewards],
    )
    if nulls := made["reward"].null_count:
        say(f"{nulls} of {len(made)} completions could not be scored by any reward function")
    return made


def as_table(
    rolled: pa.Table, schema: pa.Schema, scores: Mapping[str, list[float | None] | pa.Array], columns: Sequence[Column]
) -> pa.Table:
    """Scores beside the keys of their rollouts, with the seconds and errors of all functions together."""
    keys = {"prompt_id": rolled["prompt_id"], "sample": rolled["sample"]}
    seconds = np.sum([column.seconds for column in columns], axis=0)
    errors = _one_text(*(column.errors for column in columns))
    return pa.table({**keys, **scores, "seconds": seconds, "error": errors}, schema=schema)


def _one_text(*columns: list[str | None]) -> list[str | None]:
    """The texts of several columns, row by row."""
    if not any(map(any, columns)):  # nearly always
        return [None] * len(columns[0])
    return ["; ".join(filter(None, row)) or None for row in zip(*columns, strict=True)]


def weighted_sum(rewards: Sequence[Reward], scores: tuple[float | None, ...]) -> float | None:
    """Σ w·r over the functions that gave a score: null means "not applicable" and is never counted as 0.

    None when no function of non-zero weight gave a score: the completion is unscorable.
    """
    (total,) = _totals(rewards, [[value] for value in scores])
    return None if np.isnan(total) else float(total)


def _totals(rewards: Sequence[Reward], columns: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """The weighted sum of each row, in the order of the functions; NaN where there is none."""
    total = np.zeros(len(columns[0]))
    given = np.zeros(len(columns[0]), bool)
    for reward, column in zip(rewards, columns, strict=True):
        values = np.array(column, float)  # None is NaN
        known = ~np.isnan(values) & (reward.weight != 0)
        total[known] += reward.weight * values[known]
        given |= known
    total[~given] = np.nan
    return total


def batch_of(rolled: pa.Table, prompts: PromptSet) -> Batch:
    """What the reward functions see of a table of rollouts: TRL's arguments and every dataset column."""
    ids = rolled["prompt_id"].to_pylist()
    known = prompts.by_id(ids)
    rows: list[dict[str, Any]] = [known[prompt_id] for prompt_id in ids]
    texts = rolled["completion"].to_pylist()
    completions = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    names = [name for name in prompts.table.column_names if name not in {*OWN_ARGUMENTS, "prompt_ids", "prompt"}]
    columns = {name: [row[name] for row in rows] for name in names}
    columns["finish_reason"] = rolled["finish_reason"].to_pylist()
    return Batch([row["prompt"] for row in rows], completions, rolled["completion_ids"].to_pylist(), columns)
