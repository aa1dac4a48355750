"""Exact answers: what stands after the thinking, compared as text with the answer column."""

from __future__ import annotations

from typing import Any

from rloo_pipeline.scoring.scoring import text_of


def exact_answer_reward(completions: list[Any], answer: list[str]) -> list[float]:
    """1 where the text after the last `</think>` is exactly the answer, else 0."""
    return [
        float(text_of(completion).rpartition("</think>")[2].strip() == expected.strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]
