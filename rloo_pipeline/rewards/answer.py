"""Rewards exact answers: compares the text after the thinking with the answer column as a string."""

from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import after_thinking, text_of


def exact_answer_reward(completions: list[Any], answer: list[str | None]) -> list[float | None]:
    """1 if the text after the last `</think>` equals the answer, otherwise 0; None if the answer is null or empty, as
    a missing one is in CSV. Surrounding white space is ignored.

    Raises:
        UserError: an answer is not text.
    """
    for expected in answer:
        if not isinstance(expected, str | None):
            raise UserError(
                f"exact_answer_reward compares strings, but the column answer has {expected!r:.50} of type "
                f"{type(expected).__name__}: make it a string, or use math_reward"
            )
    golds = [(expected or "").strip() for expected in answer]
    return [
        float(after_thinking(text_of(completion)).strip() == gold) if gold else None
        for completion, gold in zip(completions, golds, strict=True)
    ]
