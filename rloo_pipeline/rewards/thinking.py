"""A reward for thinking, measured in the sampled tokens; text is not tokenized a second time.

The thinking of a completion is everything before its first end-of-think token, without a leading start-of-think token.
Both ids are looked up in the tokenizer or given as options (`</think>` is 151668 in Qwen3, 248069 in Qwen3.5).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import THINK_END, THINK_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START_OF_END = {151668: 151667, 248069: 248068}
"""The start-of-think token for the end-of-think token of Qwen3 and of Qwen3.5."""
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
    """A score for the length of the thinking before the answer, and a bonus for a question in it.

    Args:
        completion_ids: token ids of each completion.
        tokenizer_path: folder with the policy's tokenizer.json; needed where the ids below are not given.
        end_think_id: the end-of-think token; by default the tokenizer's `</think>`.
        start_think_id: the start-of-think token; by default the tokenizer's `<think>`.
        question_ids: tokens with a question mark; by default the tokenizer decodes the thinking to find one.
        short: thinking with fewer tokens is short.
        long: thinking with at least this many tokens is long.
        none_reward: score without thinking: it does not end, it is empty, or (with a tokenizer) it is white space.
        short_reward: score below `short` tokens.
        medium_reward: score from `short` tokens.
        long_reward: score from `long` tokens.
        question_bonus: added from `short` tokens where the thinking has a question mark.

    Raises:
        UserError: an id is not given and cannot be found, or `short` is not from 1 to `long`.
    """
    if not 1 <= short <= long:
        raise UserError(f"thinking_reward: short ({short}) must be from 1 to long ({long})")
    tokenizer = None if tokenizer_path is None else _tokenizer(tokenizer_path)
    if tokenizer is None and question_bonus and question_ids is None:
        raise UserError(
            "thinking_reward: without tokenizer_path (a folder with tokenizer.json) no question mark can be found; "
            "give tokenizer_path or question_ids, or set question_bonus to 0"
        )
    end = _end_token(tokenizer, tokenizer_path) if end_think_id is None else end_think_id
    start = start_think_id
    if start is None:
        start = tokenizer.token_to_id(THINK_START) if tokenizer is not None else START_OF_END.get(end)
    marks = None if question_ids is None else frozenset(question_ids)

    def score(ids: list[int]) -> float:
        thinking = _thinking(ids, start, end)
        text = None if tokenizer is None else tokenizer.decode(thinking, skip_special_tokens=False)
        if not thinking or (text is not None and not text.strip()):
            return none_reward
        if len(thinking) < short:
            return short_reward
        asks = not marks.isdisjoint(thinking) if marks is not None else any(m in (text or "") for m in QUESTION_MARKS)
        by_length = long_reward if len(thinking) >= long else medium_reward
        return round(by_length + question_bonus, 9) if asks else by_length  # 0.8, and not 0.7999999999999999

    return [score(ids) for ids in completion_ids]


def _thinking(ids: list[int], start: int | None, end: int) -> list[int]:
    """The tokens of the thinking; empty where it does not end."""
    if end not in ids:
        return []
    thinking = ids[: ids.index(end)]
    return thinking[1:] if thinking[:1] == [start] else thinking


def _end_token(tokenizer: Tokenizer | None, path: str | None) -> int:
    if tokenizer is None:
        raise UserError(
            "thinking_reward: no end-of-think token is known; give the option end_think_id or tokenizer_path"
        )
    token = tokenizer.token_to_id(THINK_END)
    if token is None:
        raise UserError(
            f"{path}: the tokenizer has no single token {THINK_END}; give thinking_reward the option end_think_id, the "
            "token that ends this model's thinking"
        )
    return token


@cache
def _tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a policy, or of its base model where the policy is an adapter."""
    from tokenizers import Tokenizer

    from rloo_pipeline.artifacts.policy import Policy

    file = Policy(Path(path)).base / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; thinking_reward's tokenizer_path must be a folder with a tokenizer.json"
        )
    return Tokenizer.from_file(str(file))
