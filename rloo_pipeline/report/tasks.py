"""Rewards by task: where rows of several tasks are in one dataset, what each function gave on each of them.

A function that does not apply to a task gives None there, so its mean over all rows says little; the share of None says
on which tasks it counts at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError, did_you_mean


class Cell(NamedTuple):
    """One function on one task under one policy."""

    mean: float | None
    """Over the completions that it scored; None where there is none."""
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
    """The tasks of a run's held-out prompts; none where report.task_column is not given.

    Raises:
        UserError: the held-out rows have no such column, or a file of the run is missing or damaged.
    """
    column = config.report.task_column
    if column is None:
        return []
    prompts = PromptSet(run / "prompts" / "eval")
    if column not in prompts.table.column_names:
        near = did_you_mean(column, prompts.table.column_names)
        raise UserError(f"report.task_column: the held-out rows have no column '{column}'{near}")
    files = [run / "evaluation" / name / "completions.parquet" for name in ("warmstart", "final")]
    before, after = (tables.read(file, "completions") for file in files)
    tables.check_aligned(before, after, str(files[1]))
    names = dict(zip(*(prompts.table[name].to_pylist() for name in ("prompt_id", column)), strict=True))
    tasks = [str(names[prompt_id]) for prompt_id in after["prompt_id"].to_pylist()]
    return by_task(before, after, tasks, [*(reward.column for reward in config.rewards), "reward"])


def by_task(before: pa.Table, after: pa.Table, tasks: Sequence[str], functions: Sequence[str]) -> list[Task]:
    """Means and shares of None.

    Args:
        before: completions of the warm start.
        after: those of the final policy, in the same order.
        tasks: each row's task.
        functions: columns with scores.

    Returns:
        Tasks in the order in which they first appear.
    """
    of_row, ids = np.asarray(tasks), np.asarray(after["prompt_id"].to_pylist())
    scores = {name: (_values(before[name]), _values(after[name])) for name in functions}
    found = []
    for task in dict.fromkeys(tasks):
        rows = of_row == task
        cells = {name: (_cell(first[rows]), _cell(last[rows])) for name, (first, last) in scores.items()}
        found.append(Task(task, len(set(ids[rows])), int(rows.sum()), cells))
    return found


def _values(column: pa.ChunkedArray) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in column.to_pylist()], dtype=np.float64)


def _cell(values: NDArray[np.float64]) -> Cell:
    known = values[~np.isnan(values)]
    return Cell(float(known.mean()) if len(known) else None, 1 - len(known) / len(values))
