"""A completion that is twice as long takes about twice as long to read, whatever a model repeats in it."""

import random
import time
from collections.abc import Callable

import pytest

from rloo_pipeline.rewards import code, format, math

PIECES = r"""
a ab A: answer Answer\sis\s the\sanswer\sto\s \s \s\s \n \t 1 11 , 1, 111, . 1. / 1/ - -\s $ € US$ USD \ \$ \frac \frac{
{ } {1} \text{ \text \boxed{ #### # < << >> > <answer> </answer> % percent k million and\s ^ ** __ ` ° \circ {,} \, \! '
− ≈ = == ( ) [ ] ! * _ ~ ``` ```\n \n``` python + x é ٣ m sin <think> </think> \approx $- and\s1 " ? ”
"""
LENGTH = 5_000
FLOOR = 0.005
"""Seconds of CPU time below which growth says nothing."""


def repetitions() -> list[tuple[str, str, str]]:
    """200 texts as (beginning, what repeats, end); the first two took quadratic time."""
    pieces = [piece.replace(r"\s", " ").replace(r"\n", "\n").replace(r"\t", "\t") for piece in PIECES.split()]
    rng = random.Random(0)

    def some(*counts: int) -> str:
        return "".join(rng.choices(pieces, k=rng.choice(counts)))

    return [
        ("####", "a", ""),
        ("```", "a", ""),
        *((some(0, 1, 2), some(1, 1, 2, 3), some(0, 1, 2)) for _ in range(198)),
    ]


READERS: dict[str, Callable[[str], object]] = {
    "answer of math_reward": lambda text: math.find(text, math.MathAnswer("B", "B")),
    "program of code_reward": code.program_of,
    "think_format_reward": lambda text: format.think_format_reward([text]),
    "answer_mark_reward": lambda text: format.answer_mark_reward([text]),
}


def growth(read: Callable[[str], object], *texts: str) -> float:
    """CPU time for the second text over that for the first."""
    measured = []
    for text in texts:
        began = time.process_time()
        read(text)
        measured.append(time.process_time() - began)
    return measured[1] / max(FLOOR, measured[0])


@pytest.mark.parametrize("name", READERS)
def test_twice_the_text_takes_at_most_2_5_times_as_long(name: str) -> None:
    for beginning, repeated, end in repetitions():
        text, twice_the_text = (beginning + repeated * (size // len(repeated)) + end for size in (LENGTH, 2 * LENGTH))
        ratio = growth(READERS[name], text, twice_the_text)
        if ratio > 2.5:  # measured again, in case this machine was busy
            ratio = min(growth(READERS[name], text, twice_the_text) for _ in range(5))
        assert ratio <= 2.5, f"{ratio:.1f} times as long for {beginning!r} + {repeated!r} * n + {end!r}"
