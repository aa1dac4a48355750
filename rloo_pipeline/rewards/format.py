"""Form of a completion: thinking in `<think>…</think>`, exactly once and first, then an answer; GSM8K's answer mark."""

from __future__ import annotations

import re
from typing import Any

from rloo_pipeline.rewards.scoring import text_of

THINK_FORMAT = re.compile(
    r"^\s*<think>(?P<work>(?:(?!</?think>).)*)</think>(?P<answer>(?:(?!</?think>).)+)$", re.DOTALL
)

ANSWER_MARK = "####"
MARKED_ANSWER = re.compile(rf"(?:^|\n){ANSWER_MARK} -?\d[\d,]*(?:\.\d+)?\s*\Z")


def think_format_reward(completions: list[Any]) -> list[float]:
    """1 where the completion is `<think>…</think>` once and then an answer, else 0 (TRL's name)."""
    return [float(bool((found := THINK_FORMAT.match(text_of(c))) and found["answer"].strip())) for c in completions]


def shows_work(completions: list[Any]) -> list[float]:
    """1 where there is something between `<think>` and `</think>`, else 0: a monitor, to be given weight 0."""
    return [float(bool((found := THINK_FORMAT.match(text_of(c))) and found["work"].strip())) for c in completions]


def answer_mark_reward(completions: list[Any]) -> list[float]:
    """1 where the completion ends in a line `#### <number>` (GSM8K's form) and has no other such mark, else 0."""
    texts = [text_of(c) for c in completions]
    return [float(text.count(ANSWER_MARK) == 1 and bool(MARKED_ANSWER.search(text))) for text in texts]
