"""Form of a completion: a regular expression; thinking in `<think>…</think>`, exactly once and first, then an answer;
GSM8K's answer mark.
"""

from __future__ import annotations

import re
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.scoring import text_of

THINK = "<think>"
THINK_FORMAT = re.compile(
    rf"^\s*{THINK}(?P<work>(?:(?!</?think>).)*)</think>(?P<answer>(?:(?!</?think>).)+)$", re.DOTALL
)

ANSWER_MARK = "####"
MARKED_ANSWER = re.compile(rf"(?:^|\n){ANSWER_MARK} -?\d[\d,]*(?:\.\d+)?\s*\Z")


def format_reward(completions: list[Any], pattern: str) -> list[float]:
    r"""1 where the whole completion is of the pattern, else 0.

    Args:
        completions: text, or messages of which the last one counts.
        pattern: a regular expression as Python's `re` reads it, whose dot matches newlines too, such as
            `.*\n#### -?\d+\s*`.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"format_reward: the option pattern '{pattern}' is no regular expression ({error})") from error
    return [float(compiled.fullmatch(text_of(c)) is not None) for c in completions]


def think_format_reward(completions: list[Any], opened: bool = False) -> list[float]:
    """1 where the completion is `<think>…</think>` once and then an answer, else 0 (TRL's name).

    Args:
        completions: text, or messages of which the last one counts.
        opened: that the chat template has written `<think>` at the end of the prompt, so that none may follow.
    """
    return [float(bool((found := _parts(c, opened)) and found["answer"].strip())) for c in completions]


def shows_work(completions: list[Any], opened: bool = False) -> list[float]:
    """1 where there is something between `<think>` and `</think>`, else 0: a monitor, to be given weight 0."""
    return [float(bool((found := _parts(c, opened)) and found["work"].strip())) for c in completions]


def answer_mark_reward(completions: list[Any]) -> list[float]:
    """1 where the completion ends in a line `#### <number>` (GSM8K's form) and has no other such mark, else 0."""
    texts = [text_of(c) for c in completions]
    return [float(text.count(ANSWER_MARK) == 1 and bool(MARKED_ANSWER.search(text))) for text in texts]


def _parts(completion: Any, opened: bool) -> re.Match[str] | None:
    return THINK_FORMAT.match((THINK if opened else "") + text_of(completion))
