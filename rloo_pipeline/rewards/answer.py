"""Exact answers: the text after the thinking, compared as a string with the answer column."""

from __future__ import annotations

from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import after_thinking, text_of


def exact_answer_reward(completions: list[Any], answer: list[str | None]) -> list[float | None]:
    """1 where the text after the last `</think>` equals the answer, else 0; surrounding white space is ignored. None
    where the answer is null.

    Raises:
        UserError: an answer is not text.
    """
    for expected in answer:
        if not isinstance(expected, str | None):
            raise UserError(
                f"exact_answer_reward compares texts, and the column answer has {expected!r:.50} of type "
                f"{type(expected).__name__}: make it a text, or use math_reward"
            )
    return [
        None if expected is None else float(after_thinking(text_of(completion)).strip() == expected.strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]
