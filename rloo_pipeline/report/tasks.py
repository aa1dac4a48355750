"""Rewards by task, for datasets that mix several tasks: the mean of each reward function on each task.

A function that does not apply to a task returns None there, so its mean over all rows says little. The share of None
shows to which tasks it applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.judging.completions import score_names, scores_of
from rloo_pipeline.report.evaluations import read_pair


class Cell(NamedTuple):
    """One function on one task under one policy."""

    mean: float | None
    """Over the completions that it scored; None if it scored none."""
    none: float
    """Share of completions that it did not score."""


class Task(NamedTuple):
    """A task and its completions."""

    name: str
    prompts: int
    completions: int
    functions: dict[str, tuple[Cell, Cell]]
    """Warm start and final policy, by function; the weighted sum is `reward`."""


def of_run(config: Config, run: Path) -> list[Task]:
    """The tasks of a run's held-out prompts; empty if report.task_column is not set.

    Raises:
        UserError: the held-out rows have no such column, or a file of the run is missing or damaged.
    """
    column = config.report.task_column
    if column is None:
        return []
    prompts = PromptSet(held_out_part(run / "prompts"))
    if column not in prompts.table.column_names:
        suggestion = did_you_mean(column, prompts.table.column_names)
        raise UserError(f"report.task_column: the held-out rows have no column '{column}'{suggestion}")
    before, after = read_pair(run)
    names = dict(zip(*(prompts.table[name].to_pylist() for name in ("prompt_id", column)), strict=True))
    tasks = [str(names[prompt_id]) for prompt_id in after["prompt_id"].to_pylist()]
    return by_task(before, after, tasks, score_names(config.rewards))


def by_task(before: pa.Table, after: pa.Table, tasks: Sequence[str], functions: Sequence[str]) -> list[Task]:
    """Means and shares of None by task and function.

    Args:
        before: completions of the warm start.
        after: completions of the final policy, in the same order.
        tasks: each row's task.
        functions: reward functions; `reward` is their weighted sum.

    Returns:
        Tasks in the order in which they first appear.
    """
    task_of_row, ids = np.asarray(tasks), np.asarray(after["prompt_id"].to_pylist())
    scores = {name: [scores_of(table, name, 1)[:, 0] for table in (before, after)] for name in functions}
    summaries = []
    for task in dict.fromkeys(tasks):
        rows = task_of_row == task
        cells = {name: (_cell(first[rows]), _cell(last[rows])) for name, (first, last) in scores.items()}
        summaries.append(Task(task, len(set(ids[rows])), int(rows.sum()), cells))
    return summaries


def _cell(values: NDArray[np.float64]) -> Cell:
    scored = values[~np.isnan(values)]
    return Cell(float(scored.mean()) if len(scored) else None, 1 - len(scored) / len(values))
