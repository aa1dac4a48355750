"""Products of two numbers, as prompts and as demonstrations with and without a call of a calculator.

A model this small cannot multiply, but it can copy: the problem into a call, and the tool's answer into its own.

    123*456  ->  call calculator("123*456"), which answers 56088  ->  56088
"""

import random
from typing import Any

from rloo_pipeline.demo.arithmetic import split_of

TOOL = "calculator"


def problems(split: str, size: int, seed: int = 0, *, digits: int = 3) -> list[dict[str, Any]]:
    """Returns `size` distinct problems with columns `prompt` and `answer`.

    Args:
        split: `train`, `dev` or `test`; a pair of factors belongs to one split, in either order.
        size: number of rows.
        seed: seed of the draws.
        digits: digits of the factors.
    """
    return [
        {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)}
        for a, b in _factors(split, size, seed, digits)
    ]


def demonstrations(
    split: str, size: int, seed: int = 0, *, called_share: float = 0.3, digits: int = 3
) -> list[dict[str, Any]]:
    """Returns right solutions of `problems(split, size, seed)` with columns `prompt` and `completion`.

    Args:
        split: as in `problems`.
        size: as in `problems`.
        seed: as in `problems`.
        called_share: share of solutions that call the calculator; the others give the product at once.
        digits: as in `problems`.
    """
    rng = random.Random(f"called {split} {seed}")
    rows = []
    for a, b in _factors(split, size, seed, digits):
        answer = {"role": "assistant", "content": str(a * b)}
        call = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": f"{a}*{b}"}}}
        calls = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": TOOL, "content": str(a * b)},
        ]
        messages = [*calls, answer] if rng.random() < called_share else [answer]
        rows.append({"prompt": [{"role": "user", "content": f"{a}*{b}"}], "completion": messages})
    return rows


def _factors(split: str, size: int, seed: int, digits: int) -> list[tuple[int, int]]:
    """Distinct pairs of factors of a split."""
    rng = random.Random(f"{split} {seed}")
    smallest, largest = 10 ** (digits - 1), 10**digits - 1
    distinct: dict[tuple[int, int], None] = {}
    while len(distinct) < size:
        a, b = rng.randint(smallest, largest), rng.randint(smallest, largest)
        if split_of(a, b) == split:
            distinct[a, b] = None
    return list(distinct)
