"""The names of advantage estimators, which are functions in `algorithm/advantages.py`."""

import ast
from functools import cache
from pathlib import Path


def estimator(name: str) -> str:
    """Import string of an advantage estimator; a built-in one may be named without its module."""
    return name if ":" in name else f"rloo_pipeline.algorithm.advantages:{name}"


MARKS = ("estimator", "whitened", "divided", "of_success")
"""Decorators of the estimators in algorithm/advantages.py."""


@cache
def estimators(*marks: str) -> tuple[str, ...]:
    """Names of the built-in advantage estimators that have any of these decorators; without arguments, all of them.

    Reads the source file, because importing it would import torch.
    """
    file = Path(__file__).parents[1] / "algorithm" / "advantages.py"
    functions = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef))
    decorators = set(marks or MARKS)
    return tuple(f.name for f in functions if decorators & {getattr(mark, "id", None) for mark in f.decorator_list})
