"""Rows of preference data, in TRL's format, as pairs of conversations.

`chosen` and `rejected` are strings or lists of messages. If there is a column `prompt`, they continue it; otherwise
both begin with the prompt. An optional column `margin` says by how much the reward of `chosen` should be higher.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rloo_pipeline.data.kinds import are_messages
from rloo_pipeline.data.prompting import check_column, with_system
from rloo_pipeline.data.rows import Row
from rloo_pipeline.errors import UserError

CHOSEN, REJECTED, PROMPT, MARGIN = "chosen", "rejected", "prompt", "margin"


class Preference(NamedTuple):
    """One pair. Prompt and completions have the form in which reward functions get them."""

    where: str
    """File and row, for messages."""
    prompt: Any
    """A text or messages; empty if the completions begin with it."""
    chosen: Any
    rejected: Any
    margin: float
    key: str
    """Equal for pairs with the same prompt."""


def preferences(rows: Sequence[Row], path: str, system_prompt: str | None) -> Iterator[Preference]:
    """Yields the pairs of the rows.

    Args:
        rows: all rows of the data.
        path: file of the rows, for messages.
        system_prompt: `dataset.system_prompt`; it is put before messages that do not begin with one.

    Raises:
        UserError: a column is missing, a row has neither strings nor messages, its completions are equal or empty, or
            its margin is not a number.
    """
    for name in (CHOSEN, REJECTED):
        check_column(name, rows[0], "preferences need it", path)
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        chosen, rejected = (_completion(row, name, where) for name in (CHOSEN, REJECTED))
        if chosen == rejected:
            raise UserError(f"{where}: chosen and rejected are equal, so it is not a preference; drop the row")
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise UserError(f"{where}: one of chosen and rejected is a string and the other is not; use one form")
        prompt = row.get(PROMPT)
        if prompt is None:
            prompt = "" if isinstance(chosen, str) else []
            key = chosen[: common(chosen, rejected)]
        else:
            if isinstance(prompt, str) and not isinstance(chosen, str):
                prompt = [{"role": "user", "content": prompt}]
            elif not isinstance(prompt, str) and not _are_texts(prompt):
                raise UserError(f"{where}: column 'prompt' holds {prompt!r:.60}; it must be a string or messages")
            key = prompt
        if system_prompt is not None:
            prompt = _with_system(prompt, chosen, system_prompt, where)
        yield Preference(where, prompt, chosen, rejected, _margin(row, where), question(key))


def question(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt in one form for strings and messages, without system messages, so that equal questions are equal."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    asked = [(one["role"], one["content"]) for one in messages if one["role"] != "system"]
    return json.dumps(asked, sort_keys=True, ensure_ascii=False)


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the beginning that two sequences have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _completion(row: Row, name: str, where: str) -> Any:
    value = row[name]
    if isinstance(value, str) and value:
        return value
    if _are_texts(value) and value[-1]["role"] == "assistant":
        return value
    raise UserError(
        f"{where}: column '{name}' holds {value!r:.60}; it must be a string, or messages that end with the assistant's"
    )


def _are_texts(value: Any) -> bool:
    """True if a value is a list of messages whose contents are strings."""
    return are_messages(value) and all(isinstance(one.get(key), str) for one in value for key in ("role", "content"))


def _with_system(prompt: Any, chosen: Any, system_prompt: str, where: str) -> Any:
    """The prompt with the run's system prompt before it, unless the messages have one."""
    if isinstance(prompt, str):
        if not prompt:
            raise UserError(
                f"{where}: dataset.system_prompt needs messages, but this row is a string that begins with its prompt; "
                "give messages, or a column prompt"
            )
        prompt = [{"role": "user", "content": prompt}]
    return with_system(prompt, system_prompt) if prompt or chosen[0]["role"] != "system" else prompt


def _margin(row: Row, where: str) -> float:
    """The margin of a row; 0 without one."""
    value = row.get(MARGIN)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{where}: column 'margin' holds {value!r:.60}; it must be a number")
    return float(value)
