"""Exact answers: the text after the thinking, compared as a string with the answer column."""

from __future__ import annotations

from typing import Any

from rloo_pipeline.scoring.completion_text import after_thinking, text_of


def exact_answer_reward(completions: list[Any], answer: list[str]) -> list[float]:
    """1 where the text after the last `</think>` equals the answer, else 0; surrounding white space is ignored."""
    return [
        float(after_thinking(text_of(completion)).strip() == expected.strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]
