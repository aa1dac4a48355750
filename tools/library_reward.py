"""The bare library that `bench_scoring.py` compares with: math-verify on every row, imported beforehand."""

from __future__ import annotations

from math_verify import parse, verify


def library_reward(completions: list[str], answer: list[str]) -> list[float]:
    """1 where math-verify finds the gold answer in the completion, else 0."""
    return [
        float(verify(parse(f"\\boxed{{{gold.rpartition('####')[2].strip()}}}"), parse(completion)))
        for completion, gold in zip(completions, answer, strict=True)
    ]
