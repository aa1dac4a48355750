"""Generates products of two numbers, as prompts and as demonstrations with and without a calculator call.

A model this small cannot multiply, but it can copy: the problem into a call, and the tool's answer into its own answer.

    123*456  ->  call calculator("123*456"), which answers 56088  ->  56088
"""

import random
from collections.abc import Iterator
from typing import Any

from rloo_pipeline.demo.arithmetic import Problem, distinct, message, operands

TOOL = "calculator"


def problems(split: str, size: int, seed: int = 0, *, digits: int = 3) -> list[dict[str, Any]]:
    """Returns `size` distinct problems with columns `prompt` and `answer`.

    Args:
        split: `train`, `dev` or `test`. A pair of factors belongs to one split, in either order.
        size: number of rows.
        seed: seed of the draws.
        digits: number of digits of the factors.

    Raises:
        ValueError: the split is unknown or has fewer problems.
    """
    return [
        {"prompt": message("user", f"{a}*{b}"), "answer": str(a * b)} for a, _, b in _factors(split, size, seed, digits)
    ]


def demonstrations(
    split: str, size: int, seed: int = 0, *, called_share: float = 0.3, digits: int = 3
) -> list[dict[str, Any]]:
    """Returns correct solutions of `problems(split, size, seed)` with columns `prompt` and `completion`.

    Args:
        split: as in `problems`.
        size: as in `problems`.
        seed: as in `problems`.
        called_share: share of solutions that call the calculator; the others give the product at once.
        digits: as in `problems`.
    """
    rng = random.Random(f"called {split} {seed}")
    rows = []
    for a, _, b in _factors(split, size, seed, digits):
        messages: list[dict[str, Any]] = [*message("assistant", str(a * b))]
        if rng.random() < called_share:
            call = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": f"{a}*{b}"}}}
            result = {"role": "tool", "name": TOOL, "content": str(a * b)}
            messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, result, *messages]
        rows.append({"prompt": message("user", f"{a}*{b}"), "completion": messages})
    return rows


def _factors(split: str, size: int, seed: int, digits: int) -> list[Problem]:
    return distinct(split, size, digits, _draws(random.Random(f"{split} {seed}"), digits))


def _draws(rng: random.Random, digits: int) -> Iterator[Problem]:
    while True:
        a, b = operands(rng, digits)
        yield a, "*", b
