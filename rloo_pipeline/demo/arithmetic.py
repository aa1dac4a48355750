"""Generates sums and differences of two numbers, as prompts and as demonstrations.

A solution works through the columns from the right, each `x±y±carry in = carry out, digit`, and then gives the answer:

    964-494  ->  <think>4-4-0=00;6-9-0=17;9-4-1=04</think>470

A pair of operands belongs to one split, whatever its order and sign, so no pair in `dev` or `test` appears in training.
Rows depend only on the arguments; a smaller `size` gives the first rows of a larger one.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

Problem = tuple[int, str, int]
"""Operand, sign, operand."""

SPLITS = ("dev", "dev", "test", *["train"] * 7)
"""The split of each tenth of all operand pairs; hyperparameters are tuned on `dev` only."""

PATIENCE = 10_000
"""Number of consecutive draws without a new problem after which a split counts as exhausted."""


def problems(split: str, size: int, seed: int = 0, *, digits: int = 3, signs: str = "+-") -> list[dict[str, Any]]:
    """Returns `size` distinct problems with columns `prompt` and `answer`.

    Args:
        split: `train`, `dev` or `test`.
        size: number of rows.
        seed: seed of the draws.
        digits: number of digits of the operands.
        signs: operators to draw from, `+`, `-` or both.

    Raises:
        ValueError: the split is unknown or has fewer problems.
    """
    return [
        {"prompt": message("user", f"{a}{sign}{b}"), "answer": str(_result(a, sign, b))}
        for a, sign, b in _problems(split, size, seed, digits, signs)
    ]


def demonstrations(
    split: str, size: int, seed: int = 0, *, worked_share: float = 0.5, digits: int = 3, signs: str = "+-"
) -> list[dict[str, Any]]:
    """Returns correct solutions of `problems(split, size, seed)` with columns `prompt` and `completion`.

    Args:
        split: as in `problems`.
        size: as in `problems`.
        seed: as in `problems`.
        worked_share: share of solutions that show the columns; the others have empty think tags.
        digits: as in `problems`.
        signs: as in `problems`.
    """
    rng = random.Random(f"worked {split} {seed}")
    rows = []
    for a, sign, b in _problems(split, size, seed, digits, signs):
        thought = work(a, sign, b) if rng.random() < worked_share else ""
        solution = f"<think>{thought}</think>{_result(a, sign, b)}"
        rows.append({"prompt": message("user", f"{a}{sign}{b}"), "completion": message("assistant", solution)})
    return rows


def preferences(
    split: str, size: int, seed: int = 0, *, worked_share: float = 0.5, digits: int = 3, signs: str = "+-"
) -> list[dict[str, Any]]:
    """Returns preferences for `problems(split, size, seed)`. `chosen` is the right solution with its columns.
    `rejected` is a wrong one, with a different digit in the answer, in a column, or in both.

    Args:
        split: as in `problems`.
        size: as in `problems`.
        seed: as in `problems`.
        worked_share: share of the wrong solutions that show columns.
        digits: as in `problems`.
        signs: as in `problems`.
    """
    rng = random.Random(f"preferences {split} {seed}")
    rows = []
    for a, sign, b in _problems(split, size, seed, digits, signs):
        columns, answer = work(a, sign, b), str(_result(a, sign, b))
        wrong = [columns if rng.random() < worked_share else "", answer]
        for part in rng.choice([[0], [1], [0, 1]]) if wrong[0] else [1]:
            wrong[part] = _with_another_digit(wrong[part], rng)
        solutions = {"chosen": f"<think>{columns}</think>{answer}", "rejected": "<think>{}</think>{}".format(*wrong)}
        answers = {name: message("assistant", solution) for name, solution in solutions.items()}
        rows.append({"prompt": message("user", f"{a}{sign}{b}"), **answers})
    return rows


def _with_another_digit(text: str, rng: random.Random) -> str:
    """Changes one digit of a text; in columns, a digit of a result."""
    columns = text.split(";")
    number = rng.randrange(len(columns))
    terms, equals, digits_ = columns[number].rpartition("=")
    place = rng.randrange(len(digits_))
    digit = rng.choice([one for one in "0123456789" if one != digits_[place]])
    columns[number] = f"{terms}{equals}{digits_[:place]}{digit}{digits_[place + 1 :]}"
    return ";".join(columns)


def work(a: int, sign: str, b: int) -> str:
    """Returns the columns of `a ± b` from the right; `b` has at most the digits of `a`, and `b ≤ a` in a difference."""
    columns, carry = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        tens, digit = divmod(_result(x, sign, y + carry), 10)
        columns.append(f"{x}{sign}{y}{sign}{carry}={abs(tens)}{digit}")
        carry = abs(tens)
    return ";".join(columns)


def split_of(a: int, b: int) -> str:
    """Returns the split of an unordered pair of operands."""
    return SPLITS[zlib.crc32(f"{min(a, b)},{max(a, b)}".encode()) % len(SPLITS)]


def distinct(split: str, size: int, digits: int, draws: Iterator[Problem]) -> list[Problem]:
    """Takes the first `size` distinct problems of a split from endless draws.

    Raises:
        ValueError: the split is unknown or has fewer problems.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(sorted(set(SPLITS)))}")
    chosen: dict[Problem, None] = {}
    misses = 0
    while len(chosen) < size:
        a, sign, b = next(draws)
        if (a, sign, b) not in chosen and split_of(a, b) == split:
            chosen[a, sign, b], misses = None, 0
        elif (misses := misses + 1) > PATIENCE:
            raise ValueError(f"the {split} split has about {len(chosen)} problems of {digits} digits, not {size}")
    return list(chosen)


def operands(rng: random.Random, digits: int) -> tuple[int, int]:
    """Two numbers with this many digits."""
    smallest, largest = 10 ** (digits - 1), 10**digits - 1
    return rng.randint(smallest, largest), rng.randint(smallest, largest)


def _problems(split: str, size: int, seed: int, digits: int, signs: str) -> list[Problem]:
    return distinct(split, size, digits, _draws(random.Random(f"{split} {seed}"), digits, signs))


def _draws(rng: random.Random, digits: int, signs: str) -> Iterator[Problem]:
    while True:
        (a, b), sign = operands(rng, digits), rng.choice(signs)
        if sign == "+":
            yield a, sign, b
        elif abs(a - b) >= 10 ** (digits - 1):
            yield max(a, b), sign, min(a, b)


def _result(a: int, sign: str, b: int) -> int:
    if sign not in ("+", "-"):
        raise ValueError(f"sign {sign!r} is neither + nor -")
    return a + b if sign == "+" else a - b


def message(role: str, content: str) -> list[dict[str, str]]:
    """A conversation with a single message."""
    return [{"role": role, "content": content}]
