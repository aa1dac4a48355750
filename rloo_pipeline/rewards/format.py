"""Rewards the format of a completion: a regular expression, `<think>…</think>` followed by an answer, or GSM8K's answer
mark.
"""

import re
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import THINK_START, text_of

THINK_FORMAT = re.compile(
    rf"^\s*{THINK_START}(?P<work>(?:(?!</?think>).)*)</think>(?P<answer>(?:(?!</?think>).)+)$", re.DOTALL
)

ANSWER_MARK = "####"
MARKED_ANSWER = re.compile(rf"(?:^|\n){ANSWER_MARK} -?\d[\d,]*(?:\.\d+)?\s*\Z")


def format_reward(completions: list[Any], pattern: str) -> list[float]:
    r"""1 if the whole completion matches a pattern, otherwise 0.

    Args:
        completions: strings, or lists of messages; the last message counts.
        pattern: regular expression in the syntax of Python's `re`, in which the dot also matches newlines, such as
            `.*\n#### -?\d+\s*`.

    Raises:
        UserError: the pattern is not a valid regular expression.
    """
    regular = compiled("format_reward", pattern, re.DOTALL)
    return [float(regular.fullmatch(text_of(c)) is not None) for c in completions]


def compiled(reward: str, pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compiles a reward's option `pattern`.

    Raises:
        UserError: it is not a valid regular expression.
    """
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise UserError(
            f"{reward}: the option pattern '{pattern}' is not a regular expression ({error}); correct it"
        ) from error


def think_format_reward(completions: list[Any], opened: bool = False) -> list[float]:
    """1 if the completion is `<think>…</think>` once and then an answer, otherwise 0 (TRL's name).

    Args:
        completions: strings, or lists of messages; the last message counts.
        opened: True if the chat template ends the prompt with `<think>`, so that the completion must not repeat it.
    """
    return [float(bool((match := _match(c, opened)) and match["answer"].strip())) for c in completions]


def shows_work(completions: list[Any], opened: bool = False) -> list[float]:
    """1 if there is text between `<think>` and `</think>`, otherwise 0. Meant as a monitor, with weight 0."""
    return [float(bool((match := _match(c, opened)) and match["work"].strip())) for c in completions]


def answer_mark_reward(completions: list[Any]) -> list[float]:
    """1 if the completion ends with a line `#### <number>` (GSM8K's format) and has no other such mark, otherwise 0."""
    texts = [text_of(c) for c in completions]
    return [float(text.count(ANSWER_MARK) == 1 and bool(MARKED_ANSWER.search(text))) for text in texts]


def _match(completion: Any, opened: bool) -> re.Match[str] | None:
    return THINK_FORMAT.match((THINK_START if opened else "") + text_of(completion))
