"""Checks that the columns of an episode agree. An episode is a completion of several turns in one row of rollouts.

`completion_ids` are all tokens after the prompt: sampled ones, and between them those of tools' answers, of users
and of the chat template. `loss_mask` is True for sampled ones, and only they have a value in
`sampling_logps`. A turn with the role `assistant` consists of exactly the tokens that were sampled in it.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts.files import REMEDY
from rloo_pipeline.errors import UserError

FINISHED = ("stop", "length", "abort")
"""Ways in which an episode ends. `stop`: the model's turn ended without a call, or no further turn was allowed.
`length`: max_completion_length or the context had no room for another token or a tool's answer.
"""
ROLES = ("assistant", "tool", "user")
CHECKED = {"completion_ids", "loss_mask", "sampling_logps", "turns", "finish_reason"}


def check(path: Path, table: pa.Table) -> None:
    """Checks the columns of episodes, if the table has all of them.

    Raises:
        UserError: the columns of a row contradict each other.
    """
    if not set(table.column_names) >= CHECKED or not len(table):
        return
    tokens, masked, values = (lengths(table[name]) for name in ("completion_ids", "loss_mask", "sampling_logps"))
    compare(path, masked, tokens, "values of loss_mask for {} tokens")
    mask = table["loss_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    bounds = np.concatenate([[0], masked.cumsum()])
    sampled = np.diff(np.concatenate([[0], mask.cumsum()])[bounds])
    compare(path, values, sampled, "sampling_logps for {} tokens that the model sampled")
    if not sampled.all():
        raise UserError(f"{path}: row {int((sampled == 0).argmax())} has no token that the model sampled; {REMEDY}")
    others = sorted({*table["finish_reason"].unique().to_pylist()} - {*FINISHED})
    if others:
        raise UserError(f"{path}: finish_reason '{others[0]}' is not one of {', '.join(FINISHED)}; {REMEDY}")
    for row, turns in enumerate(table["turns"].to_pylist()):
        begin, end = int(bounds[row]), int(bounds[row + 1])
        if not _turns_fit(turns, mask[begin:end]):
            raise UserError(f"{path}: row {row} has turns that do not fit its tokens and its loss_mask; {REMEDY}")


def _turns_fit(turns: list[dict[str, object]], mask: NDArray[np.bool_]) -> bool:
    """True if turns follow each other within the completion, and the model's turns are exactly the masked tokens."""
    bounds = [bound for turn in turns for bound in (turn["start"], turn["end"])]
    if any(before > after for before, after in pairwise([0, *bounds, len(mask)])):  # type: ignore[operator]
        return False
    expected = np.zeros_like(mask)
    for turn in turns:
        expected[turn["start"] : turn["end"]] = turn["role"] == "assistant"
    return {turn["role"] for turn in turns} <= {*ROLES} and bool((expected == mask).all())


def lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Length of the list in each row."""
    return np.asarray(column.combine_chunks().value_lengths(), dtype=np.int64)


def compare(path: Path, actual: NDArray[np.int64], expected: NDArray[np.int64], message: str) -> None:
    """Raises if a row does not have the expected number of values; `message` names both."""
    wrong = actual != expected
    if wrong.any():
        row = int(wrong.argmax())
        raise UserError(f"{path}: row {row} has {actual[row]} {message.format(expected[row])}; {REMEDY}")
