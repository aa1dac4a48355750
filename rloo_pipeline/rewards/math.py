"""Mathematical answers, compared by value: numbers as exact fractions, everything else by math-verify.

The answer of a completion is what stands in its last `\\boxed{…}`, after its last `####` or in its last
`<answer>…</answer>`, whichever comes last; else what its last `A: …`, `Answer: …` or `the answer is …` says; else its
last number. Numbers may carry currency, thousands separators, units, a percent sign (50% is 50 as well as 0.5) or a
word such as million. What cannot be read is no answer: 0.

The gold answer is read in the same way, so that it may be a bare expression, a `\\boxed{…}` or a whole GSM8K solution
that ends in `#### 42`. One that cannot be read gives None: that row is not applicable, it is not a wrong answer.

Only what follows the thinking counts: a number that happens to stand last in a thinking that never ended does not.
"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards import numbers
from rloo_pipeline.rewards.numbers import Number
from rloo_pipeline.scoring.scoring import text_of

THINK, THOUGHT = "<think>", "</think>"
SECONDS = 5
"""Longest time that math-verify may take to read, and to compare, an expression."""
LONGEST = 400
"""Characters of the longest expression that math-verify is asked about; answers are short."""

_MARK = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|####|<answer>")
_SAID = re.compile(
    r"^[^\S\n]*A:|\banswer\W{0,4}(?:\s+is)?\W{0,3}:"
    r"|\banswer(?:\s+(?:to|in)\b[^\n.:]{0,80}?)?\s+(?:is|(?:w|sh)ould be|(?:will|must) be)\b",
    re.IGNORECASE | re.MULTILINE,
)
_UNIT = re.compile(r"(?:[°/-]?[A-Za-z]{2,}+|[°/-]?[mglLhs](?![A-Za-z])|[\s.,;:!?*()\[\]°²³])*+\Z")
_GOES_ON = re.compile(
    r"\s*(?:[-+*/×÷^!<>_]\s*(?:[\d({.\\]|[A-Za-z](?![A-Za-z]))|[xX]\s*\d|(?:[,;:&]|or|and)\s*-?\d|\\)"
    r"|[A-Za-z](?![A-Za-z])(?<![mglLhs])"
)
"""What follows the first number of a longer expression, of a list, or of several guesses."""
_WORDS = re.compile(r"(?!sin|cos|tan|log|sqrt|exp|inf)[A-Za-z]{3,}")
_TOWER = re.compile(r"(?:\^|\*\*)[^+]*?(?:\^|\*\*)|(?:\^|\*\*)\s*[({]*\s*-?\s*\d{4,}|\d!|\d{60,}")


class Answer(NamedTuple):
    """What a text gives as its answer."""

    text: str
    """As written, without the dress of numbers."""
    number: Number | None
    """Its value where it is a plain number."""
    only: bool
    """Whether there is nothing beside the number but units and full stops."""


def math_reward(
    completions: list[Any],
    answer: list[Any] | None = None,
    solution: list[Any] | None = None,
    after_thinking: bool = False,
) -> list[float | None]:
    """1 where the completion's answer has the gold one's value, 0 where not, None where the gold one is unreadable.

    The stage that scores says and metrics.json counts how many are None (rewards/<name>/none).

    Args:
        completions: text, or messages of which the last one counts.
        answer: the gold answers.
        solution: the gold answers where there is no column `answer` (TRL's name).
        after_thinking: that without a `</think>` there is no answer: for chat templates that write `<think>`.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise UserError("math_reward needs a column 'answer' or 'solution' with the gold answers; the dataset has none")
    return [_score(text_of(c), gold, after_thinking) for c, gold in zip(completions, golds, strict=True)]


def _score(completion: str, gold: Any, after_thinking: bool) -> float | None:
    expected = _gold("" if gold is None else str(gold))
    if expected is None:
        return None
    _, closed, said = completion.rpartition(THOUGHT)
    said, reopened, _ = said.partition(THINK)
    if (after_thinking and not closed) or (reopened and not said.strip()):
        return 0.0
    found = find(said)
    if found is None:
        return 0.0
    if expected.number and found.number:
        return float(numbers.same(expected.number, found.number))
    if expected.text.casefold() == found.text.casefold():
        return 1.0
    # without a mark, math-verify knows best where in a sentence an expression stands
    boxed = bool(expected.number or _MARK.search(said) or not _WORDS.search(found.text))
    return float(_verified(_parsed(expected.text), _parsed(found.text) if boxed else _parsed(said[-LONGEST:], False)))


@lru_cache(maxsize=1024)  # the completions of a prompt have one gold answer
def _gold(text: str) -> Answer | None:
    """The gold answer; it has a number only where it says nothing else of mathematics."""
    found = find(text)
    if found is None:
        return None
    words = bool(_WORDS.search(found.text)) and "\\" not in found.text
    if found.number and (found.only or words):
        return found
    readable = "\\" in text if words else bool(_parsed(found.text))
    return found._replace(number=None) if readable else None


def find(text: str) -> Answer | None:
    """The answer that a text gives, None where it gives none."""
    marks = list(_MARK.finditer(text))
    if marks:
        return _read(_after(text, marks[-1]))
    bare = numbers.plain(text)
    for said in reversed(list(_SAID.finditer(bare))):
        line = bare[said.end() : said.end() + LONGEST].lstrip(" \t\n*:").partition("\n")[0]
        if any(character.isdigit() for character in line):
            return _read(line)
    bare = bare.strip()
    short = _read(bare) if len(bare) <= LONGEST and "\n" not in bare else None
    if short and (short.only or not _WORDS.search(bare)):
        return short  # a bare expression, with or without a unit
    every = numbers.numbers(bare)
    return Answer(bare, every[-1], False) if every else short


def _after(text: str, mark: re.Match[str]) -> str:
    """What a mark marks: the braces' content, the element's, or the rest of the line."""
    rest = text[mark.end() :]
    if mark[0].startswith("\\"):
        depth = 0
        for place, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return rest[rest.index("{") + 1 : place]
        return ""  # cut off before its brace closed
    if mark[0] == "<answer>":
        inside = rest.partition("</answer>")[0]
        within = _MARK.search(inside)
        return _after(inside, within) if within else inside
    return rest.lstrip().partition("\n")[0]


def _read(span: str) -> Answer | None:
    """An answer from the words that give it: what they begin with, or the last number in them."""
    text = numbers.plain(span).strip().rstrip(".,;:! ")
    if "=" in text and not re.search(r"[<>!]=", text):
        text = text.rpartition("=")[2].strip()
    if not text:
        return None
    number = numbers.first(text)
    if number is not None:
        rest = text[number.end :]
        if _GOES_ON.match(rest):
            return Answer(text, None, False)
        return Answer(text, number, bool(_UNIT.match(rest)))
    if re.search(r"[A-Za-z]{2,}\s", text) and "\\" not in text:
        every = numbers.numbers(text)
        return Answer(text, every[-1], False) if every else None
    return Answer(text, None, False)


def _verified(gold: list[Any], said: list[Any]) -> bool:
    """math-verify's verdict on what it read."""
    from math_verify import verify

    return bool(gold and said) and bool(verify(gold, said, timeout_seconds=_seconds()))


@lru_cache(maxsize=1024)
def _parsed(text: str, boxed: bool = True) -> list[Any]:
    """What math-verify reads in an expression; nothing where it is too long or would take powers of powers, which no
    time limit stops.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if len(text) > LONGEST or _TOWER.search(text):
        return []
    found = parse(
        f"\\boxed{{{text}}}" if boxed else text,
        (LatexExtractionConfig(), ExprExtractionConfig()),
        fallback_mode="no_fallback",
        parsing_timeout=_seconds(),
    )
    return list(found)


def _seconds() -> int | None:
    """math-verify's limits are alarms, which only a main thread can have."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None


def _not_of_timeouts(record: logging.LogRecord) -> bool:
    """False for the warning that timeouts are off."""
    return not record.getMessage().startswith("Timeout is disabled")


for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(_not_of_timeouts)
