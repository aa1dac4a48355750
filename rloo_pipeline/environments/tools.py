"""Tools that a configuration can name: `rollout.tools: ["rloo_pipeline.environments.tools:calculator"]`."""

import ast
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.sandbox.command_line import Sandbox, SandboxLimits
from rloo_pipeline.user_code.sandbox.program_runs import RunSettings, run_program
from rloo_pipeline.user_code.sandbox.self_test import self_test

LIMITS = SandboxLimits(seconds=10.0, memory_mb=512, file_mb=16, processes=8)
"""Resource limits for a program."""
START = """import sys; sys.stdout.reconfigure(line_buffering=True)
exec(compile({!r}, "main.py", "exec"), globals())
"""
"""Keeps what a program prints and its errors in order."""
HARNESS = re.compile(
    r"(Traceback \(most recent call last\):\n)"
    r"(?:  File \"(?:<string>|rloo_pipeline[\w.]*|program\.py)\", .*\n(?:    .*\n)*)+"
)
"""Frames of a traceback that are not the program's own; from Python 3.13 on, some have their source lines."""
OUTPUT_BYTES = 1 << 16
"""Maximum number of bytes that a program may print."""
MOST_BITS = 4096
"""Maximum number of bits of a power of 2, so that `9**9**9` fails at once; other powers have up to twice as many."""
MOST_CHARACTERS = 1000
"""Maximum length of an expression in characters."""
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as 3 * (4 + 5)

    Returns:
        The value.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has over {MOST_CHARACTERS} characters")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError:
        raise ValueError(f"{expression!r:.100} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, RecursionError, MemoryError):
        raise ValueError("the value is too large") from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))  # type: ignore[no-any-return]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](left, right)  # type: ignore[no-any-return]
    raise ValueError("only numbers with + - * / // % ** and parentheses can be computed")


def _power(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > MOST_BITS:
        raise OverflowError
    value = base**exponent
    if not isinstance(value, int | float):
        raise ValueError("the value is not a real number")
    return value


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: the program; it starts anew in each call, and prints what is to be seen

    Returns:
        What the program printed, with its errors.
    """
    run = run_program(
        RunSettings(confinement(), LIMITS, False), START.format(code), most=OUTPUT_BYTES, with_errors=True
    )
    if run.status is None:
        reason = "printed too much" if run.flooded else f"did not end within {LIMITS.seconds:g} s"
        return f"{run.printed}\n[the program {reason} and was stopped]".lstrip()
    printed = HARNESS.sub(r"\1", run.printed)
    return printed if printed else f"[nothing was printed; exit status {run.status}]"


@functools.cache
def confinement() -> Sandbox:
    """The sandbox of this machine for `python`, after its self-test.

    Raises:
        UserError: this machine has no sandbox, or its sandbox does not work.
    """
    box = sandbox.find()
    self_test(box, LIMITS)
    return box


python.before_forks = confinement  # type: ignore[attr-defined]  # tested once, before an episode is forked
