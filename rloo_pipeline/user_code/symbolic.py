"""Parses and compares LaTeX expressions with math-verify, within limits on time and size.

A time limit does not stop everything: an integer such as `9^{9^9}` is computed in a single C call, and takes memory for
all its digits. So the digits of integers that evaluating a parsed expression would compute are bounded too.
"""

import logging
import math
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

SECONDS = 5
"""math-verify's time limit in seconds, for parsing an expression and for comparing two."""
LONGEST = 400
"""Maximum number of characters in an expression, since answers are short."""
MOST_DIGITS = 20_000
"""Maximum number of digits in an integer of an expression; `2^{2024}` has 610."""

_EVALUATED_AT_ONCE = re.compile(
    r"\d{400}|\d[eE][-+]?\d{4}|\\(?:[dt]?binom|[Gg]amma|gcd|lcm|det|operatorname)\b.*(?:\d{4}|\^|!)", re.DOTALL
)
"""Pattern for expressions with potentially large numbers that the parser evaluates while it parses."""


@lru_cache(maxsize=1024)
def parsed(latex: str, sentence: bool = False) -> list[Any]:
    """Parses an expression with math-verify; empty if it cannot be parsed or exceeds a limit.

    Args:
        latex: the expression.
        sentence: True if `latex` is a text that contains the expression between dollar signs or brackets.
    """
    from math_verify import LatexExtractionConfig, parse

    if len(latex) > LONGEST or _EVALUATED_AT_ONCE.search(latex):
        return []
    text = latex if sentence else f"\\boxed{{{latex.replace('**', '^')}}}"
    return list(parse(text, (LatexExtractionConfig(),), fallback_mode="no_fallback", parsing_timeout=_seconds()))


def numbers(values: Sequence[Fraction]) -> list[Any]:
    """Converts numbers to the form that math-verify compares with expressions. Short ones are also given as decimals,
    which it rounds.
    """
    from sympy import Float, Rational

    few = [v for v in values if 10**6 % v.denominator == 0 and len(str(v.numerator).rstrip("0")) < 15]
    return [*map(Rational, values), *(Float(str(float(v))) for v in few)]


def equal(gold: list[Any], answer: list[Any]) -> bool:
    """True if math-verify finds two parsed expressions equal.

    math-verify reduces an equation to its right-hand side, which is right for `x = 5` but not for `x + y = 5`.
    """
    from math_verify import verify
    from sympy import Eq

    if not gold or not answer or max(map(digits, (*gold, *answer))) > MOST_DIGITS:
        return False
    if _is_equation(gold[0]) != _is_equation(answer[0]):
        return False
    if isinstance(gold[0], Eq) and isinstance(answer[0], Eq) and gold[0].lhs == answer[0].lhs:
        gold, answer = [gold[0].rhs], [answer[0].rhs]  # math-verify considers equations with any two matrices equal
    return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=_seconds()))


def _is_equation(expression: Any) -> bool:
    from sympy import Add, Eq, Number, Pow

    return isinstance(expression, Eq) and bool(expression.lhs.has(Add, Pow, Number))


def digits(expression: Any) -> float:
    """Upper bound on the digits of integers that evaluating a sympy expression computes. A symbol counts as 1."""
    from sympy import Float, Pow, Rational, factorial
    from sympy.concrete.expr_with_intlimits import ExprWithIntLimits

    if isinstance(expression, Rational):
        return math.log10(1 + max(abs(int(expression.p)), int(expression.q)))
    if isinstance(expression, Float):
        return float(abs(expression._mpf_[2] + expression._mpf_[3]) * math.log10(2) + 1)
    parts = [digits(part) for part in getattr(expression, "args", ())]
    if not parts:
        return 1
    if isinstance(expression, Pow):
        return parts[0] * _value(parts[1])
    if isinstance(expression, factorial):
        return parts[0] * _value(parts[0])
    if isinstance(expression, ExprWithIntLimits):
        return parts[0] * _value(max(parts[1:]))
    return sum(parts)


def _value(digits: float) -> float:
    return 10**digits if digits < 300 else math.inf


def _seconds() -> int | None:
    """The time limit; None outside the main thread, since math-verify implements time limits with SIGALRM."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None


for _name in ("math_verify.parser", "math_verify.grader"):  # they warn about time limits, once for each expression
    logging.getLogger(_name).addFilter(lambda record: not record.getMessage().startswith("Timeout"))
