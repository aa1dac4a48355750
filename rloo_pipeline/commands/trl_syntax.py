"""Finds the statements that bind names in Python source."""

import ast
import symtable
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

UNSHOWN = ast.Name("?", ast.Load(), lineno=0, col_offset=0)
"""An expression whose value the script does not show."""


Node = TypeVar("Node", bound=ast.AST)


class Binding(NamedTuple):
    """A statement that binds a name."""

    statement: ast.stmt
    value: ast.expr | None
    """The value; None for a function, class or import. For a parameter of a function, its argument or default."""
    place: int | None = None
    """Position in an unpacked tuple."""
    function: ast.FunctionDef | None = None
    """The function that the statement is in, if only lines of that function see the name."""

    @property
    def is_parameter(self) -> bool:
        """True for a parameter of a function that makes the trainer."""
        return isinstance(self.statement, ast.FunctionDef | ast.AsyncFunctionDef) and self.value is not None

    @property
    def part(self) -> ast.expr | None:
        """The element at `place`, if the value is a tuple that the script writes out; otherwise the value."""
        shown = self.value and self.place is not None and element(self.value, self.place)
        return shown or self.value

    def is_seen(self, line: int) -> bool:
        """True if a line is below the statement or, for a parameter, inside its function."""
        scope = self.statement if self.is_parameter else self.function
        if scope is not None and not scope.lineno < line <= (scope.end_lineno or line):
            return False
        return self.is_parameter or (self.statement.end_lineno or line) < line


def parameters(function: ast.FunctionDef, calls: Sequence[ast.Call]) -> dict[str, ast.expr]:
    """The value of each parameter of a function: the argument if `calls` has exactly one call, without those in the
    function itself, otherwise the default.
    """
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    found: dict[str, ast.expr] = dict.fromkeys(names, UNSHOWN)
    found |= dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    found |= {one.arg: node or UNSHOWN for one, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    lines = range(function.lineno, (function.end_lineno or 0) + 1)
    calls = [call for call in calls if name_of(call.func) == function.name and call.lineno not in lines]
    if len(calls) == 1 and not any(isinstance(argument, ast.Starred) for argument in calls[0].args):
        found |= dict(zip(names, calls[0].args, strict=False))
        found |= {keyword.arg: keyword.value for keyword in calls[0].keywords if keyword.arg in found}
    return found if len(calls) <= 1 else dict.fromkeys(found, UNSHOWN)


def all_nodes(tree: ast.AST, kind: type[Node]) -> Iterator[Node]:
    """All nodes of a kind."""
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def name_of(function: ast.expr) -> str:
    """The last part of a dotted name: `RLOOConfig` for `trl.RLOOConfig`."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def element(node: ast.expr, place: int) -> ast.expr | None:
    """An element of a tuple or list; None if there is none, for any other expression, and if one has a star."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List) and not _has_star(node) else []
    return elements[place] if place < len(elements) else None


def without_none(node: ast.expr) -> ast.expr | None:
    """The value of `value if condition else None`; None for any other expression."""
    branches = (node.body, node.orelse) if isinstance(node, ast.IfExp) else ()
    shown = [branch for branch in branches if ast.unparse(branch) != "None"]
    return shown[0] if len(shown) == 1 else None


def _has_star(node: ast.Tuple | ast.List) -> bool:
    return any(isinstance(part, ast.Starred) for part in node.elts)


def bound(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None, int | None]]:
    """Yields the names that a statement binds, each with its value and position in an unpacked tuple."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name, None, None
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield (alias.asname or alias.name).split(".")[0], None, None
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, statement.value, None
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value, None
            elif isinstance(target, ast.Tuple) and not _has_star(target):
                for index, part in enumerate(target.elts):
                    if isinstance(part, ast.Name):
                        yield part.id, statement.value, index
            else:
                yield from ((name, UNSHOWN, None) for name in _stored(target))
    else:  # inside a block that may not be entered
        yield from ((name, UNSHOWN, None) for name in _stored(statement))
        for inner in ast.walk(statement):
            if isinstance(inner, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                yield from bound(inner)


def assignments(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the places that a statement sets, each with its value: `a = b = 1`, `a: int = 1`, `a += 1`, and
    `setattr(a, "b", 1)`.
    """
    match statement:
        case ast.Assign(targets, value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target, _, ast.expr() as value):
            yield target, value
        case ast.AugAssign(target, operator, value):
            yield target, ast.copy_location(ast.BinOp(target, operator, value), statement)
        case ast.Expr(ast.Call(ast.Name("setattr"), [object_, ast.Constant(str(name)), value])):
            yield ast.copy_location(ast.Attribute(object_, name, ast.Store()), statement), value


def scopes(code: ast.AST | str) -> list[symtable.SymbolTable]:
    """The tables of names in Python code, that of its top level first."""
    tables = [symtable.symtable(code if isinstance(code, str) else ast.unparse(code), "", "exec")]
    for table in tables:
        tables += table.get_children()
    return tables


def free_names(code: ast.AST | str) -> set[str]:
    """The names that code reads, without the arguments and variables of functions and comprehensions in it."""
    top, *inner = scopes(code)
    found = [symbol for symbol in top.get_symbols() if symbol.is_referenced()]
    found += [one for table in inner for one in table.get_symbols() if one.is_referenced() and one.is_global()]
    return {symbol.get_name() for symbol in found}


def own_names(code: ast.AST) -> set[str]:
    """The arguments and variables of functions and comprehensions in code."""
    inner = (table for table in scopes(code)[1:] if table.get_type() == "function")
    return {symbol.get_name() for table in inner for symbol in table.get_symbols() if symbol.is_local()}


def _stored(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node sets."""
    return (name.id for name in all_nodes(node, ast.Name) if isinstance(name.ctx, ast.Store))
