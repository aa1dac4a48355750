"""Columns of completions and scores as arrays [prompts, samples]."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.config import Correct, Reward


def grid(column: pa.ChunkedArray, samples: int) -> NDArray[np.float64]:
    """Reads a column as [prompts, samples], NaN for null."""
    values = np.array([np.nan if value is None else value for value in column.to_pylist()], dtype=np.float64)
    return values.reshape(-1, samples)


def scores_of(table: pa.Table, function: str, samples: int) -> NDArray[np.float64]:
    """Scores of a reward function, or with `reward` their weighted sum, as [prompts, samples], NaN for null."""
    return grid(table[tables.score_column(function)], samples)


def is_correct(scores: pa.Table, rewards: list[Reward], correct: Correct, samples: int) -> NDArray[np.bool_]:
    """Which completions count as right, [prompts, samples]; an unscorable completion does not."""
    return np.nan_to_num(_deciding(scores, rewards, correct, samples), nan=-np.inf) >= correct.threshold


def counts_of(scores: pa.Table, rewards: list[Reward], correct: Correct, samples: int) -> dict[str, Counts]:
    """By prompt_id, how many completions are right, of those that the reward for it scored."""
    right = is_correct(scores, rewards, correct, samples).sum(axis=1, dtype=float).tolist()
    scored = np.isfinite(_deciding(scores, rewards, correct, samples)).sum(axis=1, dtype=float).tolist()
    return dict(zip(scores["prompt_id"].to_pylist()[::samples], map(Counts, right, scored), strict=True))


def _deciding(scores: pa.Table, rewards: list[Reward], correct: Correct, samples: int) -> NDArray[np.float64]:
    """The scores that say what is right."""
    return scores_of(scores, correct.reward or rewards[0].column, samples)
