"""Thinking, measured in the tokens that were sampled: nothing is tokenized a second time.

The thinking of a completion is what comes before its first end-of-think token, less a start-of-think token that leads
it. Ids of both are looked up in the tokenizer (`</think>` is 151668 in Qwen3, 248069 in Qwen3.5) or given as options.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START, END = "<think>", "</think>"
STARTS = {151668: 151667, 248069: 248068}
"""The start-of-think token of a known end-of-think token: Qwen3's, Qwen3.5's."""
QUESTION_MARKS = "?？؟"


def thinking_reward(
    completion_ids: list[list[int]],
    tokenizer_path: str | None = None,
    end_think_id: int | None = None,
    start_think_id: int | None = None,
    question_ids: list[int] | None = None,
    short: int = 10,
    long: int = 30,
    none_reward: float = -1.0,
    short_reward: float = 0.3,
    medium_reward: float = 0.7,
    long_reward: float = 1.0,
    question_bonus: float = 0.1,
) -> list[float]:
    """A grade for how much a completion thinks before it answers, and a bonus for asking itself something.

    Args:
        completion_ids: tokens of each completion.
        tokenizer_path: folder with the policy's tokenizer.json; needed for what the ids below leave open.
        end_think_id: the end-of-think token; the tokenizer's `</think>` where not given.
        start_think_id: the start-of-think token; the tokenizer's `<think>` where not given.
        question_ids: tokens that hold a question mark; without them the tokenizer decodes the thinking to look for one.
        short: thinking of fewer tokens is short.
        long: thinking of at least so many tokens is long.
        none_reward: for no thinking: none that ends, or nothing (as far as a tokenizer can tell: nothing but white
            space) in it.
        short_reward: for fewer than `short` tokens.
        medium_reward: from `short` tokens on.
        long_reward: from `long` tokens on.
        question_bonus: added from `short` tokens on where there is a question mark in the thinking.

    Raises:
        UserError: an id is neither given nor to be found.
    """
    if not 1 <= short <= long:
        raise UserError(f"thinking_reward: short ({short}) must be from 1 to long ({long})")
    tokenizer = None if tokenizer_path is None else _tokenizer(tokenizer_path)
    if tokenizer is None and question_bonus and question_ids is None:
        raise UserError(
            "thinking_reward: without tokenizer_path (a folder with tokenizer.json) no question mark can be found; "
            "give tokenizer_path or question_ids, or set question_bonus to 0"
        )
    end = _end(end_think_id, tokenizer, tokenizer_path)
    start = start_think_id
    if start is None:
        start = tokenizer.token_to_id(START) if tokenizer is not None else STARTS.get(end)
    marks = None if question_ids is None else frozenset(question_ids)

    def grade(ids: list[int]) -> float:
        thought = _thought(ids, start, end)
        text = None if tokenizer is None else tokenizer.decode(thought, skip_special_tokens=False)
        if not thought or (text is not None and not text.strip()):
            return none_reward
        if len(thought) < short:
            return short_reward
        asks = not marks.isdisjoint(thought) if marks is not None else any(m in (text or "") for m in QUESTION_MARKS)
        grade = long_reward if len(thought) >= long else medium_reward
        return round(grade + question_bonus, 9) if asks else grade  # 0.8, and not 0.7999999999999999

    return [grade(ids) for ids in completion_ids]


def _thought(ids: list[int], start: int | None, end: int) -> list[int]:
    """The tokens of the thinking; none where it does not end."""
    if end not in ids:
        return []
    thought = ids[: ids.index(end)]
    return thought[1:] if thought[:1] == [start] else thought


def _end(given: int | None, tokenizer: Tokenizer | None, path: str | None) -> int:
    if given is not None:
        return given
    if tokenizer is None:
        raise UserError(
            "thinking_reward: no end-of-think token is known; give the option end_think_id or tokenizer_path"
        )
    found = tokenizer.token_to_id(END)
    if found is None:
        raise UserError(
            f"{path}: the tokenizer has no single token {END}; give thinking_reward the option end_think_id, the token "
            "that ends this model's thinking"
        )
    return found


@cache
def _tokenizer(path: str) -> Tokenizer:
    """A policy's tokenizer; that of its base where the policy is an adapter."""
    from tokenizers import Tokenizer

    from rloo_pipeline.artifacts.policy import base_of

    file = base_of(Path(path)) / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; thinking_reward's tokenizer_path must be a folder with a tokenizer.json"
        )
    return Tokenizer.from_file(str(file))
