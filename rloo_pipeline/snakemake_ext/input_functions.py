"""Tells Snakemake the parameters of the workflow's functions once, which it otherwise inspects for every job.

Of the time in which Snakemake 9.27 plans a run of 1,000 rounds, `inspect.signature` is a seventh. Snakemake itself has
a way to name a function's parameters, which its `subpath` uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any


def note_parameters(rules: Iterable[Any]) -> None:
    """Notes the parameters of all functions in the inputs, params, resources and priorities of Snakemake's rules."""
    from snakemake.common import get_function_params, overwrite_function_params

    for function in {id(function): function for rule in rules for function in _functions(rule)}.values():
        overwrite_function_params(function, get_function_params(function))


def _functions(rule: Any) -> Iterator[Any]:
    """The plain functions of a rule; Snakemake wraps those of inputs in a string, those of resources in an object."""
    values = [*rule.input, *rule.params, *rule.resources.values(), rule.priority]
    for value in values:
        value = getattr(value, "_file", value)
        value = getattr(value, "callable", None) or getattr(value, "_evaluator", None) or value
        if inspect.isfunction(value):
            yield value
