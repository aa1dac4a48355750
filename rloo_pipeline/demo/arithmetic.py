"""Sums and differences of two numbers, as prompts to practise on and as demonstrations to start from.

A solution works in columns from the right, each `x±y±carry in = carry out, digit`, and then says the answer:

    964-494  ->  <think>4-4-0=00;6-9-0=17;9-4-1=04</think>470

A pair of operands belongs to one split, whatever its order and sign, so nothing of `dev` or `test` is seen in training.
Rows depend on the arguments alone, and a smaller `size` gives the first rows of a larger one.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

_Problem = tuple[int, str, int]

SPLITS = ("dev", "dev", "test", *["train"] * 7)
"""The owner of each tenth of all operand pairs; recipes are chosen on `dev` only."""

_PATIENCE = 10_000
"""Draws in a row without a new problem after which a split counts as exhausted."""


def problems(split: str, size: int, seed: int = 0, *, digits: int = 3, signs: str = "+-") -> list[dict[str, Any]]:
    """Return `size` distinct problems, prompt and answer; operands have `digits` digits and answers no fewer."""
    return [
        {"prompt": _message("user", f"{a}{sign}{b}"), "answer": str(_result(a, sign, b))}
        for a, sign, b in _distinct(split, size, seed, digits, signs)
    ]


def demonstrations(
    split: str, size: int, seed: int = 0, *, worked_share: float = 0.5, digits: int = 3, signs: str = "+-"
) -> list[dict[str, Any]]:
    """Return right solutions of `problems(split, size, seed)`; a `worked_share` of them shows its work."""
    chance = random.Random(f"worked {split} {seed}")
    rows = []
    for a, sign, b in _distinct(split, size, seed, digits, signs):
        thought = work(a, sign, b) if chance.random() < worked_share else ""
        solution = f"<think>{thought}</think>{_result(a, sign, b)}"
        rows.append({"prompt": _message("user", f"{a}{sign}{b}"), "completion": _message("assistant", solution)})
    return rows


def work(a: int, sign: str, b: int) -> str:
    """Return the columns of `a ± b` from the right; `b` is no longer than `a`, and no larger in a difference."""
    columns, carry = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        tens, digit = divmod(_result(x, sign, y + carry), 10)
        columns.append(f"{x}{sign}{y}{sign}{carry}={abs(tens)}{digit}")
        carry = abs(tens)
    return ";".join(columns)


def split_of(a: int, b: int) -> str:
    """Return the split that owns the unordered pair of operands."""
    return SPLITS[zlib.crc32(f"{min(a, b)},{max(a, b)}".encode()) % len(SPLITS)]


def _distinct(split: str, size: int, seed: int, digits: int, signs: str) -> list[_Problem]:
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(sorted(set(SPLITS)))}")
    found: dict[_Problem, None] = {}
    misses = 0
    for problem in _drawn(random.Random(f"{split} {seed}"), digits, signs):
        if len(found) == size:
            return list(found)
        is_new = problem not in found and split_of(problem[0], problem[2]) == split
        misses = 0 if is_new else misses + 1
        if is_new:
            found[problem] = None
        elif misses > _PATIENCE:
            raise ValueError(f"the {split} split has about {len(found)} problems of {digits} digits, not {size}")
    raise AssertionError("the stream of problems never ends")


def _drawn(chance: random.Random, digits: int, signs: str) -> Iterator[_Problem]:
    smallest, largest = 10 ** (digits - 1), 10**digits - 1
    while True:
        a, b, sign = chance.randint(smallest, largest), chance.randint(smallest, largest), chance.choice(signs)
        if sign == "+":
            yield a, sign, b
        elif abs(a - b) >= smallest:
            yield max(a, b), sign, min(a, b)


def _result(a: int, sign: str, b: int) -> int:
    if sign not in ("+", "-"):
        raise ValueError(f"sign {sign!r} is neither + nor -")
    return a + b if sign == "+" else a - b


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]
