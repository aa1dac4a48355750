"""Mathematical answers, compared by value with math-verify.

The gold answer may be a bare expression, `\\boxed{…}`, or a GSM8K solution that ends in `#### 42`. A gold answer that
cannot be parsed gives None: that row is not applicable, it is not a wrong answer.
"""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from rloo_pipeline.rewards.scoring import text_of

TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())


def math_reward(completions: list[Any], answer: list[str]) -> list[float | None]:
    """1 where the completion's answer (after any thinking) equals the gold one, 0 where not, None where the gold is
    unreadable.
    """
    return [_compare(text_of(c).rpartition("</think>")[2], gold) for c, gold in zip(completions, answer, strict=True)]


def _compare(completion: str, gold: str) -> float | None:
    expected = parse(_gold_of(gold), TARGETS, parsing_timeout=None)
    if not expected:
        return None
    found = parse(_gold_of(completion), TARGETS, parsing_timeout=None)
    return float(bool(found) and verify(expected, found, timeout_seconds=None))


def _gold_of(text: str) -> str:
    """What follows GSM8K's mark, with thousands separators and currency taken off; the whole text where there is no
    mark.
    """
    _, mark, after = text.rpartition("####")
    return after.strip().replace(",", "").lstrip("$") if mark else text
