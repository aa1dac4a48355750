"""Parses the tests of a row for `code_reward`, in the forms that datasets use."""

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from symtable import SymbolTable, symtable
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.sandbox.inside.examiner import standard_modules

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOOK_UP_NAMES = {"eval", "exec", "globals", "locals", "vars", "__import__"}
"""Builtins through which tests can reach names that they do not spell out."""


class UnusableTestsError(Exception):
    """The tests of a row cannot be run with any program."""


class Asserts(NamedTuple):
    """Python code to run after the program."""

    units: list[tuple[str, bool]]
    """Pieces of code, each with True if it is a test and False if it is preparation."""
    builtin: str = ""
    """The builtin that the program's function is named after; empty if it has another name."""

    @property
    def num_tests(self) -> int:
        """The number of tests."""
        return sum(is_test for _, is_test in self.units)


class ScriptCase(NamedTuple):
    """The standard input of a script and its expected output."""

    input: str
    output: str


def read_tests(column_value: Any, entry_point: str | None) -> Asserts | list[ScriptCase] | None:
    """Parses the tests of a row; None if it has none.

    Args:
        column_value: the row's value in the column of tests.
        entry_point: name of the function under test, for tests that define `check`.

    Raises:
        UserError: the value is neither a string, a list of strings, nor a list of inputs with outputs.
        UnusableTestsError: the tests are not valid Python, assert nothing, or name several builtins but no function of
            the program.
    """
    if column_value is None or column_value == "" or column_value == []:
        return None
    if isinstance(column_value, str):
        return _asserts([column_value], entry_point)
    if isinstance(column_value, Sequence) and all(isinstance(test, str) for test in column_value):
        return _asserts(list(column_value), entry_point)
    if isinstance(column_value, Sequence) and all(isinstance(t, Mapping) and "output" in t for t in column_value):
        return [ScriptCase(_text(test, "input"), _text(test, "output")) for test in column_value]
    raise UserError(
        f"the tests of a row ({column_value!r:.50}) are neither a string, a list of strings, nor a list of "
        "{input, output}: convert the column to one of these forms"
    )


def _text(test: Mapping[str, Any], key: str) -> str:
    """The input or output of a test. Numbers are refused because they can be written in several ways."""
    value = test.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    raise UserError(
        f"the tests of a row have an {key} that is not text but {type(value).__name__} ({value!r:.50}): make it a "
        "string, exactly as a program reads or prints it"
    )


def _asserts(texts: list[str], entry_point: str | None) -> Asserts:
    """Parses asserts: each of several strings is one unit, and a single string is split into statements."""
    try:
        return _split(texts, entry_point)
    except (SyntaxError, ValueError) as error:
        raise UnusableTestsError(f"not valid Python: {error}") from None
    except (RecursionError, MemoryError):  # the exceptions that Python's parser and compiler raise
        raise UnusableTestsError("an expression is too long or nested too deeply for Python") from None


def _split(texts: list[str], entry_point: str | None) -> Asserts:
    trees = [ast.parse(text) for text in texts]
    for tree in trees:
        compile(tree, "tests.py", "exec")
    statements = [node for tree in trees for node in tree.body]
    helpers = {node.name for node in statements if isinstance(node, DEFINITIONS) and _contains_assert(node, set())}
    if len(trees) == 1:
        units = [(ast.unparse(node), _is_test(node, helpers)) for node in statements]
    else:
        tests = [any(_is_test(node, helpers) for node in tree.body) for tree in trees]
        units = list(zip(texts, tests, strict=True))
    asserts = Asserts(units)
    if "check" in helpers and entry_point and not asserts.num_tests:
        asserts.units.append((f"check({entry_point})", True))
    if not asserts.num_tests:
        raise UnusableTestsError("nothing is asserted, or nothing calls 'check' and the row names no entry point")
    return asserts._replace(builtin=_tested_builtin([text for text, _ in asserts.units]))


def _tested_builtin(texts: list[str]) -> str:
    """The builtin that the program has to define, as in MBPP's `assert sum(10, 15) == 6`: the only name that the tests
    use without defining it. Empty if they also use names that are not builtins.
    """
    scopes = [scope for text in texts for scope in _scopes(symtable(text, "tests.py", "exec"))]
    names = [name for scope in scopes for name in scope.get_symbols() if name.is_global()]
    defined = {name.get_name() for name in names if name.is_assigned() or name.is_imported()} | {"__name__"}
    used = {name.get_name() for name in names if name.is_referenced()} - defined - standard_modules(texts)
    if used - {*dir(builtins)} or used & LOOK_UP_NAMES:
        return ""
    if len(used) > 1:
        raise UnusableTestsError(f"they name nothing but builtins, and several of them: {', '.join(sorted(used))}")
    return "".join(used)


def _scopes(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _is_test(statement: ast.stmt, helpers: set[str]) -> bool:
    return not isinstance(statement, DEFINITIONS) and _contains_assert(statement, helpers)


def _contains_assert(node: ast.AST, helpers: set[str]) -> bool:
    """True if a node contains an assert, or calls a function that asserts."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Call):
            name = getattr(inner.func, "id", getattr(inner.func, "attr", ""))
            if name in helpers or name.startswith("assert"):
                return True
    return False
