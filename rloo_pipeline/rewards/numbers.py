"""Numbers as people and models write them: `$1,234.50`, `1 1/2`, `3/4 of a cup`, `50%`, `1.5 million`, `\\frac{3}{4}`.

Values are exact fractions, so that 0.75 is 3/4 and a huge number costs nothing. What is no plain number (`2x`, `3, 4`,
`9**9`) is left to whoever asks.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST = 60
"""Digits of the longest number that is read: more is a model that repeats itself, and slow to reckon with."""

_CURRENCY = r"(?:US|[CA])?[$€£¥₹]|\b(?:USD|EUR|GBP|INR|Rs\.?)"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
_WORDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORD = r"(?:(?P<kilo>k\b)|\s{0,2}-?\s{0,2}(?P<word>thousand|million|billion|trillion)s?\b)?"
_PERCENT = r"(?P<percent>\s*(?:%|percent\b|pct\b))?"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>(?<![\w)])(?<![\d)]\s)-|(?<![\w)])(?<![\w)]\s)-\s)?(?:(?P<whole>\d+)\s+(?:and\s+)?(?P<part>\d+)\s?/\s?(?P<parts>\d+)"
    rf"|(?P<top>{_DIGITS})\s?/\s?(?P<bottom>{_DIGITS})|(?P<plain>{_DIGITS})){_WORD}{_PERCENT}",
    re.IGNORECASE,
)

_PLAIN = (
    (re.compile(r"<<[^<>\n]*>>"), ""),  # GSM8K's calculator annotations
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|textit|mbox|bf)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|[\u00a0\u2009\u202f'](?=\d{3}))+(?=\d)"), ""),  # other thousands separators
    (re.compile(r"\\[dtc]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)"), r" \1/\2 "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[()\[\]]|\\(?:left|right|displaystyle|quad|qquad)\b|\\[,;:! ]|~"), " "),
    (re.compile(r"\\(?=[$€£])|(?<![\d)])\*\*|\*\*(?![\d(])|__|`"), ""),
    (re.compile(r"\^\s*\{?\\circ\}?|\\degree\b"), "°"),
    (re.compile("[−–‐‑](?=[\\s$€£¥₹]*[\\d.])"), "-"),
    (re.compile(rf"-\s?(?:{_CURRENCY})\s*(?=[\d.])"), "-"),
    (re.compile(rf"(?:{_CURRENCY})\s*(?=-?[\d.])"), ""),
    (re.compile(r"\$"), " "),  # what is left of them encloses LaTeX
    (re.compile(r"\\approx\b|≈|\\Rightarrow\b|⇒"), "="),
)


class Number(NamedTuple):
    """A number in a text, with what it may mean."""

    values: tuple[Fraction, ...]
    """As written; and, where it carries a percent sign or a word such as million, what it then amounts to."""
    start: int
    end: int


def plain(text: str) -> str:
    """The text without what dresses numbers up: LaTeX, bold, currency, calculator annotations, odd separators."""
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text


def numbers(text: str) -> list[Number]:
    """All numbers of a text that went through `plain`, in their order; those that cannot be reckoned with are left
    out.
    """
    found = (_read(match) for match in _NUMBER.finditer(text))
    return [number for number in found if number is not None]


def first(text: str) -> Number | None:
    """The number that a text (which went through `plain`) begins with, if it does."""
    lead = len(text) - len(text.lstrip(" \t\n(:~="))
    match = _NUMBER.match(text, lead)
    return _read(match) if match else None


def same(gold: Number, said: Number) -> bool:
    """Whether two numbers agree in one of their meanings, to 6 decimals where one of them has decimals."""
    return any(abs(a - b) <= _tolerance(a, b) for a in gold.values for b in said.values)


def _tolerance(gold: Fraction, said: Fraction) -> Fraction:
    if gold.denominator == said.denominator == 1:
        return Fraction(0)
    return Fraction(2, 10**6) * min(Fraction(1), abs(gold))


def _read(match: re.Match[str]) -> Number | None:
    parts = match.groupdict()
    if sum(character.isdigit() for character in match[0]) > LONGEST:
        return None
    try:
        if parts["whole"] is not None:
            value = int(parts["whole"]) + Fraction(int(parts["part"]), int(parts["parts"]))
        elif parts["top"] is not None:
            value = _decimal(parts["top"]) / _decimal(parts["bottom"])
        else:
            value = _decimal(parts["plain"])
    except ZeroDivisionError:
        return None
    if parts["sign"]:
        value = -value
    values = [value]
    if word := parts["word"] or (parts["kilo"] and "thousand"):
        values.append(value * _WORDS[word.lower()])
    if parts["percent"]:
        values.append(value / 100)
    return Number(tuple(values), match.start(), match.end())


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
