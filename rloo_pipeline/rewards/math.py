"""Compares mathematical answers by value: numbers as exact fractions, everything else with math-verify.

The answer is in the completion's last `\\boxed{…}` (boxes that only a comma, `and` or `or` separates form a list), in
its last `<answer>…</answer>`, or after its last `####`, whichever comes last. Without such a mark, it is the text after
the last `A: `, `Answer: ` or `the answer is `; failing that, the last number. A completion without a readable answer
scores 0. Only text after the thinking counts; if the thinking does not end, there is no answer.

Numbers may have currency, thousands separators, units, a percent sign (50% equals 50 and 0.5) or a word such as
million, and may be mixed (`2 1/2`). `x = 5` and `2 + 3 = 5` are 5; other equations stay equations. If the gold answer
is a letter, the answer is the letter that the text begins with: `B`, `(B)` or `B) Paris`, but not `A or B`. Words,
times (`3:30`) and numbers with a base (`101_2`) are compared as text. For everything else, math-verify judges the
LaTeX, within limits on time and size.

The gold answer is read in the same way, so it may be a bare expression, a `\\boxed{…}` or a whole GSM8K solution that
ends with `#### 42`. A gold answer that cannot be read gives None; `rloo check` counts these before a run.
"""

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import number_parsing, symbolic
from rloo_pipeline.user_code.completion_text import THINK_END, THINK_START, text_of
from rloo_pipeline.user_code.number_parsing import Number

_HEADING = r"[^\S\n]*[*_]*[A-Za-z]{2}[^\n]*\n\s*\S"
"""Text after `####` that is a Markdown heading and not an answer. A heading that begins with a number looks like an
answer.
"""
_MARK = re.compile(rf"\\(?:boxed|fbox)\s*(?=\{{)|(?<=[^\n#])#{{4,}}+|(?<![^\n])#{{4,}}+(?!{_HEADING})|<answer>")
_SEPARATOR = re.compile(r"[\s$]*(?:,|;|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b)[\s$]*(?:[A-Za-z]\w{0,3}\s?=\s?)?")
"""Text between two boxes that form one list."""
_MINUS = re.compile(r"(?:[$(=]\s?-\s?|(?:\s|\A)-)\Z")
_POWER = re.compile(r"\s*\\?%|\^\{?\w{1,9}\}?|\s*\\pi\b")
"""Text after a box that still belongs to its value."""
_ANSWER_IS = re.compile(
    r"^[^\S\n]*A:|\banswer\W{0,4}(?:\s+is)?\W{0,3}:"
    r"|\banswer(?:\s+(?:to|in)\b[^\n.:]{0,80}?)?\s+(?:is|(?:w|sh)ould be|(?:will|must) be)\b",
    re.IGNORECASE | re.MULTILINE,
)
_UNIT = re.compile(r"(?:[°/-]?[A-Za-z]{2,}+(?:\s?\^\{?[23]\}?)?|[°/-]?[mglLhs](?![A-Za-z])|[\s.,;:!?*()\[\]°²³])*+\Z")
_GOES_ON = re.compile(
    r"\s*(?:[-+*/÷^!<>_]\s*(?:[\d({.\\]|[A-Za-z](?![A-Za-z]))|[xX]\s*\d|(?:[,;:&]|or|and)\s*-?\d|\\)"
    r"|!|\s*[α-ω](?<!μ)(?![ά-ώ])|[A-Za-z](?![A-Za-z])(?<![mglLhs])"
    r"|\s+[a-z](?<![mglhs])(?![A-Za-z]|\s+[A-Za-z]{2}|\.[A-Za-z])"
)
"""Matches after a first number if the text is a longer expression, a list, or several guesses."""
_WORDS = re.compile(
    r"(?<![A-Za-z\\])(?!sin|cos|tan|log|exp|and\b|[pbv]?matrix|array|cases|align)[A-Za-z]{3,}|\b[Nn][Oo]\b|[^\W\d_](?<![\0-ͯα-ω])"
)
_NEGATED = re.compile(
    r"(?:\bnot|\bnever|n't|\bneither|\bexcept|\b(?:more|less|greater|fewer) than|[<>])\D{0,15}[\d.,/]+\D*\Z",
    re.IGNORECASE,
)
"""Matches a last number that is not the answer."""
_LETTER = re.compile(r"[(\[]?([A-Za-z])[)\]]?")
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?[\s(\[\"“]*([A-Za-z])(?!\w)"
    r"(?![\s,;:/&|)\]\"”]*(?:(?:or|and)\b\W*)?(?!a\s+\w|I\b)[A-Za-z](?!\w))"
    r"(?:\s*(?:[.,:;)\]\"”]|\Z)|(?<=[A-Z])\s+(?:[-–—]\s+)?[A-Za-z]{2})"
)
"""Matches a text that begins with a single letter, alone or followed by words, but not by a second letter."""
_EQUALS = re.compile(r"(?<![<>!\\])=|\\approx\b|≈|\\Rightarrow\b|⇒")
_NAME = re.compile(r"[\s$]*((?:\\?[A-Za-z]+(?:_\{?\w{1,9}\}?)?)(?:\([\w, ]{1,9}\))?|\([A-Za-z](?:, ?[A-Za-z])+\))\s*")
_UNKNOWN = re.compile(r"(?<![A-Za-z\\])(?!(?<=\d)\s?[xX]\s?\d|(?<=\d\s)[xX]\s?\d|[mgLlhs])[A-Za-z](?![A-Za-z])")
"""Matches a letter that stands for a number, but not the `x` in `3 x 4` or the unit in `5 m`."""
_VERBATIM = re.compile(r"\d{1,2}:\d\d(?!\d).*|\w+_\{?\d+\}?", re.DOTALL)
"""Matches a time, or a number with its base, which math-verify would read as a quotient and as a base-10 number."""


class MathAnswer(NamedTuple):
    """An answer found in a text."""

    text: str
    """The answer, without LaTeX around its words and numbers."""
    latex: str
    """The answer in the form passed to math-verify."""
    number: Number | None = None
    """The answer as a number, if it is a single plain number."""
    only: bool = False
    """True if there is nothing but units and punctuation around the number."""
    name: str = ""
    """`x` if the answer is `x = 5`; `text` and `latex` then hold `5`."""
    sentence: bool = False
    """True if `latex` has words around the expression."""

    @property
    def key(self) -> str:
        """A key that is equal for answers that are written alike."""
        letter = _LETTER.fullmatch(self.text)
        return letter[1].casefold() if letter else re.sub(r"[\s{}]", "", self.text.casefold())

    @property
    def has_words(self) -> bool:
        """True if the text has words and no LaTeX."""
        return "\\" not in self.text and bool(_WORDS.search(self.text))

    @property
    def is_text(self) -> bool:
        """True if the answer is words, not mathematics."""
        return self.number is None and self.has_words and not re.search(r"[\d=^<>+*]", self.text)


def math_reward(
    completions: list[Any],
    answer: list[Any] | None = None,
    solution: list[Any] | None = None,
    after_thinking: bool = False,
) -> list[float | None]:
    """1 if the completion's answer equals the gold answer, otherwise 0; None if the gold answer is unreadable.

    The metric `rewards/<name>/none` in metrics.json counts the Nones.

    Args:
        completions: strings, or lists of messages; the last message counts.
        answer: gold answers.
        solution: gold answers, if there is no column `answer` (TRL's name).
        after_thinking: True if a completion without `</think>` has no answer, for chat templates that write `<think>`.

    Raises:
        UserError: there is neither a column `answer` nor a column `solution`.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise UserError("math_reward needs a column 'answer' or 'solution' with the gold answers; the dataset has none")
    return [_score(text_of(c), gold, after_thinking) for c, gold in zip(completions, golds, strict=True)]


def _score(completion: str, gold: Any, after_thinking: bool) -> float | None:
    expected = _gold("" if gold is None or gold != gold else str(gold))  # NaN, a missing number, is not the text "nan"
    if expected is None:
        return None
    _, closed, reply = completion.rpartition(THINK_END)
    reply, reopened, _ = reply.partition(THINK_START)
    if (after_thinking and not closed) or (reopened and not reply.strip()):
        return 0.0
    answer = find(reply, expected)
    return float(answer is not None and _equal(expected, answer))


def _equal(gold: MathAnswer, answer: MathAnswer) -> bool:
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.number and answer.number:
        return number_parsing.same(gold.number, answer.number)
    if gold.key == answer.key:
        return True
    if gold.is_text or _VERBATIM.fullmatch(gold.text) or (answer.has_words and not answer.sentence):
        return False
    expected = symbolic.numbers(gold.number.values) if gold.number else symbolic.parsed(gold.latex)
    return symbolic.equal(expected, symbolic.parsed(answer.latex, answer.sentence))


@lru_cache(maxsize=1024)  # cached, since the completions of a prompt share a gold answer
def _gold(text: str) -> MathAnswer | None:
    """Parses a gold answer. It has a number only if the text contains no other mathematics."""
    answer = find(text)
    if answer is None or (answer.number and (answer.only or answer.has_words)):
        return answer
    if not _MARK.search(text):  # as if it were in a box, where completions have theirs
        answer = _read(number_parsing.ascii_mathematics(text), prose=False) or answer
    return (
        answer._replace(number=None) if re.search(r"\w", answer.text) and len(answer.text) <= symbolic.LONGEST else None
    )


def find(text: str, gold: MathAnswer | None = None) -> MathAnswer | None:
    """Finds the answer in a text, or None. `gold` is the gold answer if the text is a completion."""
    text = number_parsing.ascii_mathematics(text)
    wanted = None if gold is None or gold.number else gold
    letter = wanted is not None and bool(_LETTER.fullmatch(wanted.text))
    if marks := list(_MARK.finditer(text)):
        span, in_box = _marked(text, marks)
        if letter and (choice := _CHOICE.match(number_parsing.plain(span).strip())):
            return MathAnswer(choice[1], choice[1])
        return _read(span, not in_box)
    bare = number_parsing.plain(text)
    for match in reversed(list(_ANSWER_IS.finditer(bare))):
        line = bare[match.end() : match.end() + symbolic.LONGEST].lstrip(" \t\n*:").partition("\n")[0]
        if letter and (choice := _CHOICE.match(line)):
            return MathAnswer(choice[1], choice[1])
        if wanted and wanted.is_text and line:
            return _read(re.split(r"[.,;:!?](?:\s|\Z)", line)[0])
        if wanted and _WORDS.search(line):
            continue
        if line if wanted else any(map(str.isdigit, line)):
            return _read(line)
    bare, worded = bare.strip(), bool(_WORDS.search(bare))
    short = _read(text.strip(), worded) if len(bare) <= symbolic.LONGEST and "\n" not in bare else None
    if short and (short.only or not worded):
        return short  # a bare expression, with or without a unit
    if wanted:
        return MathAnswer(short.text if short else "", text.strip()[-symbolic.LONGEST :], sentence=True)
    numbers = number_parsing.numbers(bare)
    return MathAnswer(bare, bare, numbers[-1]) if numbers else short


def _marked(text: str, marks: list[re.Match[str]]) -> tuple[str, bool]:
    """The text of the last mark, and True if the mark is a box. The text is the content of the box (with the other
    boxes of its list), the content of the element, or the rest of the line.
    """
    mark = marks[-1]
    if mark[0] == "<answer>":
        return text[mark.end() :].partition("</answer>")[0], False
    if mark[0].startswith("#"):
        return text[mark.end() :].lstrip().partition("\n")[0], False
    end = _closing(text, mark.end())
    content = text[mark.end() + 1 : max(end, 0)]  # empty if the closing brace is missing
    if content and (after := _POWER.match(text, end + 1)):
        content += after[0]
    if content and _MINUS.search(text[max(0, mark.start() - 4) : mark.start()]):
        content = f"-{content}" if content.isalnum() else f"-({content})"
    parts = [content]
    for earlier, later in pairwise(reversed(marks)):
        end = _closing(text, later.end()) if later[0].startswith("\\") else -1
        if end < 0 or not _SEPARATOR.fullmatch(text, end + 1, earlier.start()):
            break
        parts.append(text[later.end() + 1 : end])
    return ", ".join(dict.fromkeys(reversed(parts))), True


def _closing(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`; -1 if there is none."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return -1


def _read(span: str, prose: bool = True) -> MathAnswer | None:
    """Reads the answer in a short text: its leading number or expression, otherwise its last number. In prose, `18!` is
    18.
    """
    name, latex = _sides(span)
    text = number_parsing.plain(latex).strip().rstrip(".,;:! " if prose else ".,;: ")
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+", text):
        text = text.replace(" ", "")
    if not text:
        return None
    end = len(latex.rstrip(".,;: \t\n"))
    # keeps `\,` and similar commands whole
    answer = MathAnswer(text, latex[: end + latex.endswith("\\", 0, end)], name=name)
    if number := number_parsing.first(text):
        rest = text[number.end :]
        return answer if _GOES_ON.match(rest) else answer._replace(number=number, only=bool(_UNIT.match(rest)))
    if re.search(r"[A-Za-z]{2}\s", text) and "\\" not in text and not _NEGATED.search(text[-symbolic.LONGEST :]):
        numbers = number_parsing.numbers(text)
        return answer._replace(number=numbers[-1]) if numbers else answer
    return answer


def _sides(text: str) -> tuple[str, str]:
    """Splits `x = 5`, `2 + 3 = 5` or `x = 2 + 3 = 5` into name and value. Other texts are a value without a name."""
    *left, value = _EQUALS.split(text)
    names = [name[1] for side in left if (name := _NAME.fullmatch(side))]
    if all(_NAME.fullmatch(side) or _WORDS.search(side) or not _UNKNOWN.search(side) for side in left):
        single = next((name for name in names if len(name) == 1 or "(" in name or "_" in name), "")
        return re.sub(r"\s", "", single), value
    return "", text
