"""Reading completions and scores as arrays of [prompts, samples]."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.config import Correct, Reward


def grid(column: pa.ChunkedArray, samples: int) -> NDArray[np.float64]:
    """A column as [prompts, samples], NaN where null."""
    values = np.array([np.nan if value is None else value for value in column.to_pylist()], dtype=np.float64)
    return values.reshape(-1, samples)


def right(scored: pa.Table, rewards: list[Reward], correct: Correct, samples: int) -> NDArray[np.bool_]:
    """Which completions count as right, [prompts, samples]; one that could not be scored does not."""
    deciding = correct.reward or rewards[0].column
    return np.nan_to_num(grid(scored[deciding], samples), nan=-np.inf) >= correct.threshold
