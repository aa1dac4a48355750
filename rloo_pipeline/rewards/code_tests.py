"""The tests of a row as `code_reward` runs them, out of the forms in which datasets have them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class UnusableError(Exception):
    """The tests of a row cannot be run, whatever the program."""


class Asserts(NamedTuple):
    """Python to run after the program, piece by piece, and whether each piece is a test or only prepares."""

    units: list[tuple[str, bool]]

    @property
    def tests(self) -> int:
        """How many tests there are."""
        return sum(counts for _, counts in self.units)


class Case(NamedTuple):
    """What a script is given on its standard input, and what it shall print."""

    input: str
    output: str


def read_tests(given: Any, entry: str | None, where: str) -> Asserts | list[Case] | None:
    """The tests of a row; None where it has none.

    Raises:
        UserError: they are neither a string, a list of strings, nor a list of inputs with outputs.
        UnusableError: they are no Python, or assert nothing.
    """
    if given is None or given == "" or given == []:
        return None
    if isinstance(given, str):
        return _asserts([given], entry)
    if isinstance(given, Sequence) and all(isinstance(test, str) for test in given):
        return _asserts(list(given), entry)
    if isinstance(given, Sequence) and all(isinstance(test, Mapping) and "output" in test for test in given):
        return [Case(test.get("input") or "", test["output"] or "") for test in given]
    raise UserError(
        f"the tests of {where} are neither a string, a list of strings, nor a list of {{input, output}}: "
        "bring the column into one of these forms"
    )


def _asserts(texts: list[str], entry: str | None) -> Asserts:
    """Each of several strings is a piece; one string alone is taken apart into its statements."""
    try:
        trees = [ast.parse(text) for text in texts]
    except (SyntaxError, ValueError) as error:
        raise UnusableError(f"no Python: {error}") from None
    statements = [node for tree in trees for node in tree.body]
    helpers = {node.name for node in statements if isinstance(node, DEFINITIONS) and _asserts_something(node, set())}
    if len(trees) == 1:
        units = [(ast.unparse(node), _is_test(node, helpers)) for node in statements]
    else:
        tests = [any(_is_test(node, helpers) for node in tree.body) for tree in trees]
        units = list(zip(texts, tests, strict=True))
    made = Asserts(units)
    if "check" in helpers and entry and not made.tests:
        made.units.append((f"check({entry})", True))
    if not made.tests:
        raise UnusableError("nothing is asserted, or nothing calls 'check' and the row names no entry point")
    return made


def _is_test(statement: ast.stmt, helpers: set[str]) -> bool:
    return not isinstance(statement, DEFINITIONS) and _asserts_something(statement, helpers)


def _asserts_something(node: ast.AST, helpers: set[str]) -> bool:
    """Whether there is an assert in it, or a call of a function that asserts."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Call):
            name = getattr(inner.func, "id", getattr(inner.func, "attr", ""))
            if name in helpers or name.startswith("assert"):
                return True
    return False
