"""Replaces functions of Snakemake in this process."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts the decorated function in place of one of Snakemake's, which it gets as its first argument. Does nothing if
    another workflow in this process has done so.

    Args:
        owner: class or module of Snakemake.
        name: name of the function in it.
    """
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        @wraps(function)
        def replacement(*values: Any, **options: Any) -> Any:
            return function(original, *values, **options)

        if not original.__module__.startswith("rloo_pipeline."):
            setattr(owner, name, replacement)

    return replace
