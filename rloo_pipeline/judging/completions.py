"""Columns of completions and scores as arrays [prompts, samples]."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.checks.statistics import reaches
from rloo_pipeline.config import Config, Reward


def grid(column: pa.ChunkedArray, samples: int) -> NDArray[np.float64]:
    """Reads a column as [prompts, samples], NaN for null."""
    values = np.array([np.nan if value is None else value for value in column.to_pylist()], dtype=np.float64)
    return values.reshape(-1, samples)


def scores_of(table: pa.Table, function: str, samples: int) -> NDArray[np.float64]:
    """Scores of a reward function (or for `reward`, the weighted sum) as [prompts, samples], NaN for null."""
    return grid(table[tables.score_column(function)], samples)


def score_names(rewards: list[Reward]) -> list[str]:
    """Names that `scores_of` takes: the reward functions, and `reward`."""
    return [*(reward.column for reward in rewards), "reward"]


def is_correct(config: Config, scores: pa.Table, samples: int) -> NDArray[np.bool_]:
    """True for completions that count as right, [prompts, samples]; unscorable completions do not."""
    return reaches(scores_of(scores, config.deciding_reward.column, samples), config.correct.threshold)


def counts_of(config: Config, scores: pa.Table, samples: int) -> dict[str, Counts]:
    """For each prompt_id, the number of right completions among those that the reward scored."""
    right = is_correct(config, scores, samples).sum(axis=1, dtype=float).tolist()
    scored = np.isfinite(scores_of(scores, config.deciding_reward.column, samples)).sum(axis=1, dtype=float).tolist()
    counts: dict[str, Counts] = {}
    for prompt_id, *group in zip(scores["prompt_id"].to_pylist()[::samples], right, scored, strict=True):
        # with rollout.token_budget, several groups of a prompt may end in a round
        others = counts.get(prompt_id, (0.0, 0.0))
        counts[prompt_id] = Counts(others[0] + group[0], others[1] + group[1])
    return counts
