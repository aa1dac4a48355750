"""Inputs and results of reward functions.

A reward function is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async (TRL's
convention). Without `**kwargs` it gets only the arguments that it names. `tokenizer_path`, the folder of the policy's
tokenizer, is passed only to functions that name it. A function must return one finite number or None per completion;
anything else is an error that names the function and the row.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rloo_pipeline.config import Reward
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.user_code.reward_call import OWN_ARGUMENTS, Scores


class RewardBatch(NamedTuple):
    """The inputs of reward functions: lists with one entry per completion."""

    prompts: list[Any]
    """Messages or strings, as in the dataset."""
    completions: list[Any]
    """A list with one assistant message if the prompt is messages, otherwise a string (TRL's convention)."""
    completion_ids: list[list[int]] | None
    """Token ids; None if they are unknown, in which case no function gets them."""
    columns: Mapping[str, list[Any]]
    """Every dataset column."""

    def arguments(self) -> dict[str, list[Any]]:
        """All arguments that a function can take, by name."""
        own = zip(OWN_ARGUMENTS, self[:3], strict=True)
        return {**self.columns, **{name: values for name, values in own if values is not None}}


class FunctionScores(NamedTuple):
    """The results of one function, in lists with one entry per row."""

    scores: Scores
    errors: list[str | None]
    """Why a row has no score because the function failed or took too long."""
    notes: list[str | None]
    """Why a row has no score, as reported by the function itself (`reward_call.unscored`)."""
    seconds: list[float]
    """The row's share of the wall time of its calls."""


def log_summary(reward: Reward, result: FunctionScores) -> None:
    """Logs one line with the mean score and the number of rows without one."""
    values = [value for value in result.scores if value is not None]
    mean = f"{sum(values) / len(values):.4f}" if values else "–"
    line = f"reward {reward.column}: mean {mean} over {len(values)} of {len(result.scores)}"
    for outcome, rows in (("failed", result.errors), ("could not be scored", result.notes)):
        if reasons := [text for text in rows if text]:
            line += f"; {len(reasons)} {outcome}, the first: {reasons[0]}"
    say(line)
