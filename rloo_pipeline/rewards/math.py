"""Mathematical answers, compared by value: numbers as exact fractions, everything else by math-verify.

The answer of a completion is the content of its last `\\boxed{…}`, of its last `<answer>…</answer>`, or the text after
its last `####`, whichever comes last. Without such a mark it is the text after the last `A: `, `Answer: ` or
`the answer is `; else the last number. Numbers may carry currency, thousands separators, units, a percent sign (50%
equals 50 and 0.5) or a word such as million. Where the gold answer is a letter, the answer is the letter with which
the text after such words begins: `B`, `(B)` or `B) Paris`, and not `A or B`. A completion without a readable answer
scores 0.

A Markdown heading that begins with a word (`#### Step 2: total`) is no mark if text follows. One that begins with a
number (`#### 2. The total`) cannot be told from an answer.

The gold answer is read in the same way, so it may be a bare expression, a `\\boxed{…}` or a whole GSM8K solution that
ends with `#### 42`. A gold answer that cannot be read gives None: the row does not apply, its answer is not wrong.

Only the text after the thinking counts. The last number of a thinking that does not end is no answer.
"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring import number_parsing
from rloo_pipeline.scoring.completion_text import THINK_END, THINK_START, text_of
from rloo_pipeline.scoring.number_parsing import Number

SECONDS = 5
"""Time limit of math-verify for parsing an expression, and for comparing two."""
LONGEST = 400
"""Most characters of an expression that math-verify gets; answers are short."""

_HEADING = r"[^\S\n]*[*_]*[A-Za-z]{2}[^\n]*\n\s*\S"
"""What follows the `####` of a Markdown heading."""
_MARK = re.compile(rf"\\(?:boxed|fbox)\s*(?=\{{)|(?<=[^\n#])#{{4,}}+|(?<![^\n])#{{4,}}+(?!{_HEADING})|<answer>")
_ANSWER_IS = re.compile(
    r"^[^\S\n]*A:|\banswer\W{0,4}(?:\s+is)?\W{0,3}:"
    r"|\banswer(?:\s+(?:to|in)\b[^\n.:]{0,80}?)?\s+(?:is|(?:w|sh)ould be|(?:will|must) be)\b",
    re.IGNORECASE | re.MULTILINE,
)
_UNIT = re.compile(r"(?:[°/-]?[A-Za-z]{2,}+|[°/-]?[mglLhs](?![A-Za-z])|[\s.,;:!?*()\[\]°²³])*+\Z")
_GOES_ON = re.compile(
    r"\s*(?:[-+*/×÷^!<>_]\s*(?:[\d({.\\]|[A-Za-z](?![A-Za-z]))|[xX]\s*\d|(?:[,;:&]|or|and)\s*-?\d|[\\√])"
    r"|[²³]|\s*[α-ω](?<!μ)(?![ά-ώ])|[A-Za-z](?![A-Za-z])(?<![mglLhs])"
    r"|\s+[a-z](?<![mglhs])(?![A-Za-z]|\s+[A-Za-z]{2}|\.[A-Za-z])"
)
"""Matches after a first number where the text is a longer expression, a list, or several guesses."""
_WORDS = re.compile(r"(?!sin|cos|tan|log|sqrt|exp|inf)[A-Za-z]{3,}")
_LETTER = re.compile(r"[(\[]?([A-Za-z])[)\]]?")
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?[\s(\[\"“]*([A-Za-z])(?!\w)"
    r"(?![\s,;:/&|)\]\"”]*(?:(?:or|and)\b\W*)?(?!a\s+\w|I\b)[A-Za-z](?!\w))"
    r"(?:\s*(?:[.,:;)\]\"”]|\Z)|(?<=[A-Z])\s+(?:[-–—]\s+)?[A-Za-z]{2})"
)
"""A text that begins with one letter, alone or with words after it, and goes on with no second letter."""
_TOWER = re.compile(r"(?:\^|\*\*)[^+]*?(?:\^|\*\*)|(?:\^|\*\*)\s*[({]*\s*-?\s*\d{4,}|\d!|\d{60,}")


class MathAnswer(NamedTuple):
    """The answer in a text."""

    text: str
    """The answer after `number_parsing.plain`."""
    number: Number | None
    """Its value where it is one plain number."""
    only: bool
    """Whether the number has only units and punctuation beside it."""


def math_reward(
    completions: list[Any],
    answer: list[Any] | None = None,
    solution: list[Any] | None = None,
    after_thinking: bool = False,
) -> list[float | None]:
    """1 where the completion's answer equals the gold answer, 0 where not, None where the gold answer is unreadable.

    The metric `rewards/<name>/none` in metrics.json is the number of None.

    Args:
        completions: strings, or lists of messages of which the last one counts.
        answer: the gold answers.
        solution: the gold answers where there is no column `answer` (TRL's name).
        after_thinking: a completion without `</think>` has no answer; for chat templates that write `<think>`.

    Raises:
        UserError: there is neither a column `answer` nor a column `solution`.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise UserError("math_reward needs a column 'answer' or 'solution' with the gold answers; the dataset has none")
    return [_score(text_of(c), gold, after_thinking) for c, gold in zip(completions, golds, strict=True)]


def _score(completion: str, gold: Any, after_thinking: bool) -> float | None:
    expected = _gold("" if gold is None else str(gold))
    if expected is None:
        return None
    _, closed, reply = completion.rpartition(THINK_END)
    reply, reopened, _ = reply.partition(THINK_START)
    if (after_thinking and not closed) or (reopened and not reply.strip()):
        return 0.0
    answer = find(reply, "" if expected.number else expected.text)
    if answer is None:
        return 0.0
    if expected.number and answer.number:
        return float(number_parsing.same(expected.number, answer.number))
    if expected.text.casefold() == answer.text.casefold():
        return 1.0
    # in a sentence without a mark, math-verify itself finds the expression
    boxed = bool(expected.number or _MARK.search(reply) or not _WORDS.search(answer.text))
    parsed = _parsed(answer.text) if boxed else _parsed(reply[-LONGEST:], False)
    return float(_verified(_parsed(expected.text), parsed))


@lru_cache(maxsize=1024)  # the completions of a prompt share a gold answer
def _gold(text: str) -> MathAnswer | None:
    """The gold answer; it has a number only where the text contains no other mathematics."""
    answer = find(text)
    if answer is None:
        return None
    has_words = bool(_WORDS.search(answer.text)) and "\\" not in answer.text
    if answer.number and (answer.only or has_words):
        return answer
    readable = "\\" in text if has_words else bool(_parsed(answer.text))
    letter = _LETTER.fullmatch(answer.text)
    return MathAnswer(letter[1] if letter else answer.text, None, False) if readable else None


def find(text: str, gold: str = "") -> MathAnswer | None:
    """The answer in a text; None where there is none. `gold` is a gold answer without a number, where it has none."""
    marks = list(_MARK.finditer(text))
    if marks:
        return _read(_after(text, marks[-1]))
    bare = number_parsing.plain(text)
    for match in reversed(list(_ANSWER_IS.finditer(bare))):
        line = bare[match.end() : match.end() + LONGEST].lstrip(" \t\n*:").partition("\n")[0]
        if gold and _LETTER.fullmatch(gold) and (choice := _CHOICE.match(line)):
            return MathAnswer(choice[1], None, False)
        if any(map(str.isdigit, line)) or (gold and line and not _WORDS.search(line)):
            return _read(line)
    bare = bare.strip()
    short = _read(bare) if len(bare) <= LONGEST and "\n" not in bare else None
    if short and (short.only or not _WORDS.search(bare)):
        return short  # a bare expression, with or without a unit
    numbers = number_parsing.numbers(bare)
    return MathAnswer(bare, numbers[-1], False) if numbers else short


def _after(text: str, mark: re.Match[str]) -> str:
    """The text that belongs to the last mark: the content of the braces or of the element, or the rest of the line."""
    rest = text[mark.end() :]
    if mark[0].startswith("\\"):
        depth = 0
        for place, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return rest[rest.index("{") + 1 : place]
        return ""  # the closing brace is missing
    if mark[0] == "<answer>":
        return rest.partition("</answer>")[0]
    return rest.lstrip().partition("\n")[0]


def _read(span: str) -> MathAnswer | None:
    """The answer in a short text: its leading number or expression, or its last number."""
    text = number_parsing.plain(span).strip().rstrip(".,;:! ")
    if "=" in text and not re.search(r"[<>!]=", text):
        text = text.rpartition("=")[2].strip()
    if not text:
        return None
    number = number_parsing.first(text)
    if number is not None:
        rest = text[number.end :]
        if _GOES_ON.match(rest):
            return MathAnswer(text, None, False)
        return MathAnswer(text, number, bool(_UNIT.match(rest)))
    if re.search(r"[A-Za-z]{2}\s", text) and "\\" not in text:
        numbers = number_parsing.numbers(text)
        return MathAnswer(text, numbers[-1], False) if numbers else None
    return MathAnswer(text, None, False)


def _verified(gold: list[Any], answer: list[Any]) -> bool:
    """Whether math-verify finds two parsed expressions equal."""
    from math_verify import verify

    return bool(gold and answer) and bool(verify(gold, answer, timeout_seconds=_seconds()))


@lru_cache(maxsize=1024)
def _parsed(text: str, boxed: bool = True) -> list[Any]:
    """An expression as math-verify parses it; empty where it is too long or has powers of powers, which no time limit
    stops.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if len(text) > LONGEST or _TOWER.search(text):
        return []
    parsed = parse(
        f"\\boxed{{{text}}}" if boxed else text,
        (LatexExtractionConfig(), ExprExtractionConfig()),
        fallback_mode="no_fallback",
        parsing_timeout=_seconds(),
    )
    return list(parsed)


def _seconds() -> int | None:
    """math-verify implements its time limits with alarms, which only a main thread can use."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None


def _not_of_timeouts(record: logging.LogRecord) -> bool:
    """A logging filter that drops the warning that timeouts are off."""
    return not record.getMessage().startswith("Timeout is disabled")


for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(_not_of_timeouts)
