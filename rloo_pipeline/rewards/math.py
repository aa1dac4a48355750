"""Mathematical answers, compared by value with math-verify.

The gold answer may be a bare expression, `\\boxed{…}`, or a GSM8K solution that ends in `#### 42`. A gold answer that
cannot be parsed gives None: that row is not applicable, it is not a wrong answer. A completion that never ends its
thinking has no answer: a number that happens to stand last in it does not count.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rloo_pipeline.rewards.scoring import text_of

TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())
THINK, THOUGHT = "<think>", "</think>"


def math_reward(completions: list[Any], answer: list[str]) -> list[float | None]:
    """1 where the completion's answer (after any thinking) equals the gold one, 0 where not, None where the gold is
    unreadable.
    """
    return [_compare(text_of(c), gold) for c, gold in zip(completions, answer, strict=True)]


def _compare(completion: str, gold: str) -> float | None:
    expected = parse(_marked(gold), TARGETS, parsing_timeout=None)
    if not expected:
        return None
    thinking, _, said = completion.rpartition(THOUGHT)
    if not thinking and THINK in said:
        return 0.0
    found = parse(_marked(said), TARGETS, parsing_timeout=None)
    return float(bool(found) and verify(expected, found, timeout_seconds=None))


def _marked(text: str) -> str:
    """What follows GSM8K's mark, with thousands separators and currency taken off; the whole text where there is no
    mark.
    """
    _, mark, after = text.rpartition("####")
    return after.strip().replace(",", "").lstrip("$") if mark else text


def _not_of_timeouts(record: logging.LogRecord) -> bool:
    """False for the warning that timeouts are off: they are alarms, which only a main thread can have."""
    return not record.getMessage().startswith("Timeout is disabled")


for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(_not_of_timeouts)
