"""Numbers as people and models write them: `$1,234.50`, `1 1/2`, `3/4 of a cup`, `50%`, `1.5 million`, `2.5e-3`,
`\\frac{3}{4}`.

Values are exact fractions, so 0.75 equals 3/4. The caller handles expressions that are not a single plain number (`2x`,
`3, 4`, `9**9`).
"""

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST = 60
"""Maximum number of digits in a number. Longer ones come from models that repeat themselves, and are slow to
compute.
"""

_CURRENCY = r"(?:US|[CA])?[$€£¥₹]|\b(?:USD|EUR|GBP|INR|Rs\.?)"
_EXPONENT = r"(?:[eE][-+]?\d{1,2}(?!\w|\.\d))?"
_DIGITS = rf"(?:(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+){_EXPONENT}"
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
    (re.compile(r"\$"), " "),  # the remaining ones enclose LaTeX
    (re.compile(r"\\approx\b|≈|\\Rightarrow\b|⇒"), "="),
)


_ASCII = str.maketrans(
    {"²": "^2", "³": "^3", "×": r"\times ", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup "}
    | {"∅": r"\emptyset ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "·": r"\cdot "}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "⅛": " 1/8"}
    | dict(zip("０１２３４５６７８９", "0123456789", strict=True))
)
_REPEATING = re.compile(r"(\d{0,9})\.(\d{0,9})\\(?:overline|bar)\s*\{(\d{1,9})\}")


class Number(NamedTuple):
    """A number found in a text, with its possible values."""

    values: tuple[Fraction, ...]
    """The value as written, and the value with its percent sign or its word such as million applied."""
    end: int
    """Index of the character after the number."""


def ascii_mathematics(text: str) -> str:
    """Replaces symbols such as `√` and `½` by LaTeX, and `0.1\\overline{6}` by a fraction."""

    def fraction(match: re.Match[str]) -> str:
        whole, fixed, repeated = match.groups()
        scale = 10 ** len(fixed)
        top = int(f"0{whole}{fixed}") * (10 ** len(repeated) - 1) + int(repeated)
        return rf"\frac{{{top}}}{{{scale * (10 ** len(repeated) - 1)}}}"

    text = (text if text.isascii() else text.translate(_ASCII)).replace(r"\varnothing", r"\emptyset")
    return _REPEATING.sub(fraction, text) if "\\" in text else text


def plain(text: str) -> str:
    """Removes LaTeX, bold, currency, calculator annotations and unusual separators around the numbers in a text."""
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    return text


def numbers(text: str) -> list[Number]:
    """All numbers in a text that can be parsed, in order. Call `plain` on the text first."""
    return [number for match in _NUMBER.finditer(text) if (number := _parse(match))]


def first(text: str) -> Number | None:
    """The number at the beginning of a text, if there is one. Call `plain` on the text first."""
    lead = len(text) - len(text.lstrip(" \t\n(:~="))
    match = _NUMBER.match(text, lead)
    return _parse(match) if match else None


def same(gold: Number, answer: Number) -> bool:
    """True if two numbers have a value in common; values are compared to 6 decimals unless both are integers."""
    return any(abs(a - b) <= _tolerance(a, b) for a in gold.values for b in answer.values)


def _tolerance(gold: Fraction, answer: Fraction) -> Fraction:
    if gold.denominator == answer.denominator == 1:
        return Fraction(0)
    return Fraction(2, 10**6) * min(Fraction(1), abs(gold))


def _parse(match: re.Match[str]) -> Number | None:
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
    return Number(tuple(values), match.end())


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
