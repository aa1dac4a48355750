"""The statements of a script that are read, and the expressions that its names stand for."""

import ast
import builtins
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline.commands import trl_syntax
from rloo_pipeline.commands.trl_syntax import UNSHOWN, Binding, Node, all_nodes, free_names, name_of

PASSES = 5
"""Most conditions inside each other that are read, since each pass knows the names that the one before found."""


class ScriptNames(ABC):
    """The statements of a script that are read, and the names that they bind.

    Args:
        path: the script's file.
        tree: its syntax tree.
        options: its command-line options.
        calls: the call that makes the trainer, and the calls of the functions around it.
        makers: these functions.
    """

    def __init__(
        self,
        path: Path,
        tree: ast.Module,
        options: Mapping[str, Any],
        calls: Sequence[ast.Call],
        makers: Sequence[ast.FunctionDef],
    ) -> None:
        self.path, self.tree, self.options, self.calls = path, tree, options, calls
        self.functions = list(all_nodes(tree, ast.FunctionDef))
        self.call_lines: dict[str, list[int]] = {}
        """Lines of the calls of each name."""
        for call in all_nodes(tree, ast.Call):
            self.call_lines.setdefault(name_of(call.func), []).append(call.lineno)
        self.taken: set[int] = set()
        """First lines of the statements that the project takes over."""
        self.statements: list[ast.stmt] = []
        self.bindings: dict[str, list[Binding]] = {}
        self.followed: dict[str, ast.expr | None] = {}
        """Functions of whose results the project is made, with what they return if the script shows it."""
        self.inner: list[ast.stmt] = []
        """Their statements."""
        self.modules: dict[str, str] = {}
        """The script's own modules that copies of its code import, and the folders that they are in."""
        for _ in range(PASSES):
            read = list(self._flat(tree.body))
            if read == self.statements:
                break
            self.statements, self.bindings, self.followed, self.inner = read, {}, {}, []
            for function in makers:
                self._bind_parameters(function, calls)
            for statement in read:
                self._bind(statement)

    @abstractmethod
    def holds(self, condition: ast.expr) -> bool | None:
        """True if a condition holds; None if the script does not show it."""

    def _bind(self, statement: ast.stmt, function: ast.FunctionDef | None = None) -> None:
        for name, value, place in trl_syntax.bound(statement):
            self.bindings.setdefault(name, []).append(Binding(statement, value, place, function))

    def _bind_parameters(self, function: ast.FunctionDef, calls: Sequence[ast.Call]) -> None:
        for name, passed in trl_syntax.parameters(function, calls).items():
            self.bindings.setdefault(name, []).append(Binding(function, passed))

    def _flat(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """Statements in order, including those in blocks and in the functions in which the trainer is made, and those
        of the branch that applies if the script shows the condition.
        """
        for statement in body:
            block = self._block(statement)
            if block is None:
                yield statement
            else:
                yield from self._flat(block)

    def _block(self, statement: ast.stmt) -> Sequence[ast.stmt] | None:
        """The part of a compound statement that is read as if it stood alone; None if the statement is kept whole."""
        for part in ("body", "orelse"):
            block = getattr(statement, part, ())
            if any(node in self.calls for inner in block for node in ast.walk(inner)):
                return block
        if not isinstance(statement, ast.If) or (holds := self.holds(statement.test)) is None:
            return None
        return statement.body if holds else statement.orelse

    def at(self, node: ast.AST, problem: str) -> str:
        """Formats a problem with its position in the script; of a command of TRL, there are no lines to show."""
        line = f", line {getattr(node, 'lineno', '?')}" if self.path.exists() else ""
        return f"{self.path}{line}: {problem}"

    def binding(self, name: str, before: int) -> Binding | None:
        """The last statement above a line that binds a name. A function, class or import may also be below, and for a
        line of a function, the only statement that binds the name.
        """
        known = self.bindings.get(name, [])
        above = [binding for binding in known if binding.is_seen(before)]
        hides = max((binding.statement.lineno for binding in above if binding.is_parameter), default=0)
        above = [binding for binding in above if binding.statement.lineno >= hides]  # not what a parameter hides
        usable = above or [binding for binding in known if binding.value is None]
        if not usable and any(one.lineno < before <= (one.end_lineno or 0) for one in self.functions):
            below = [binding for binding in known if not binding.function and not binding.is_parameter]
            usable = below if len(below) == 1 else []
        return usable[-1] if usable else None

    def resolved(self, node: ast.expr, take: bool = True) -> ast.expr:
        """The expression that a name stands for. With `take`, the lines that define it count as taken over by the
        project.
        """
        if isinstance(node, ast.Name) and (found := self.binding(node.id, node.lineno)) and found.value is not None:
            if take:
                self.taken.add(found.statement.lineno)
            if found.place is None:
                return self.resolved(found.value, take)
            several = self._returned(found.value)
            if part := trl_syntax.element(several, found.place):
                return self.resolved(part, take)
            if isinstance(several, ast.Call) and name_of(several.func) == "from_pretrained":
                return several  # model, tokenizer = FastLanguageModel.from_pretrained(…)
        elif isinstance(node, ast.Call) and (returned := self._returned(node)) is not node:
            return self.resolved(returned, take)
        return node

    def origin(self, node: ast.expr) -> tuple[ast.expr, Any]:
        """The expression that a name or `results[1]` stands for or is a part of, and the position of that part."""
        place: Any = None
        while True:
            if isinstance(node, ast.Subscript):
                place = node.slice.value if isinstance(node.slice, ast.Constant) else place
                node = node.value
                continue
            found = self.binding(node.id, node.lineno) if isinstance(node, ast.Name) else None
            if found is None or found.part is None or found.part is UNSHOWN:
                return node, place
            place = found.place if found.part is found.value and found.place is not None else place
            node = found.part

    def own_modules(self, statement: ast.AST) -> Iterator[tuple[str, Path]]:
        """Yields the script's own modules that a statement imports, each with the folder where Python finds it: the
        script's, one between that and the working folder, or the one with its package.
        """
        own, working = self.path.resolve().parent, Path.cwd()
        parents = zip(own.parents, (own, *own.parents), strict=False)
        folders = [own, *(up for up, down in parents if up.is_relative_to(working) or (down / "__init__.py").is_file())]
        for node in ast.walk(statement):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [str(node.module), *(f"{node.module}.{name}" for name in names)]
            for name in names:
                for folder in folders:
                    path = folder.joinpath(*name.split("."))
                    if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
                        yield name, folder
                        break

    def assigned(self, kind: type[Node]) -> Iterator[tuple[Node, ast.expr]]:
        """Yields the attributes or the entries that lines such as `config.beta = 0.1` set, each with its value, in the
        order in which they run.
        """
        lines = (*self.statements, *self.inner)
        for statement in sorted(lines, key=lambda statement: self.when(statement.lineno)):
            for place, value in trl_syntax.assignments(statement):
                if isinstance(place, kind):
                    yield place, value

    def when(self, line: int, *later: int) -> tuple[int, ...]:
        """The place at which a line runs: the lines of the calls that lead to its function, and its own. A function
        that is called elsewhere, or several times, counts as called at the end.
        """
        for function in reversed(self.functions):  # the innermost first
            if function.lineno < line <= (function.end_lineno or 0) and line not in later:
                calls = self.call_lines.get(function.name, ())
                return self.when(calls[0] if len(calls) == 1 else sys.maxsize, line, *later)
        return line, *later

    def is_same(self, one: ast.expr, other: ast.expr) -> bool:
        """True if two expressions stand for the same object, as far as the script shows it."""
        if isinstance(one, ast.Name) and isinstance(other, ast.Name):
            is_written = one.id == other.id and self.binding(one.id, one.lineno) == self.binding(other.id, other.lineno)
        else:
            is_written = ast.unparse(one) == ast.unparse(other)
        target = self.resolved(one, take=False)
        is_target = target is not UNSHOWN and target is self.resolved(other, take=False)
        return is_written or is_target or self.origin(one) == self.origin(other)

    def passed(self, node: ast.expr | None) -> ast.expr | None:
        """The argument that a function that makes the trainer gets for a parameter; any other expression unchanged."""
        while isinstance(node, ast.Name) and (found := self.binding(node.id, node.lineno)) and found.is_parameter:
            if found.value is None or found.value is UNSHOWN:
                break
            node = found.value
        return node

    def function_of(self, call: ast.expr) -> ast.FunctionDef | None:
        """The function of the script that an expression calls by its name; None for any other expression."""
        called = call.func if isinstance(call, ast.Call) else None
        found = self.binding(called.id, called.lineno) if isinstance(called, ast.Name) else None
        return found.statement if found and isinstance(found.statement, ast.FunctionDef) else None

    def _returned(self, node: ast.expr) -> ast.expr:
        """The expression that a called function of the script returns, if the script shows it; otherwise the node."""
        function = self.function_of(node)
        if function is None or function.decorator_list:
            return node
        if function.name not in self.followed:
            self.followed[function.name] = None  # a function that calls itself shows nothing
            self.followed[function.name] = self._follow(function)
        return self.followed[function.name] or node

    def _follow(self, function: ast.FunctionDef) -> ast.expr | None:
        """Binds the names of a function. Returns the expression that it returns; None if there are several or none."""
        self._bind_parameters(function, list(all_nodes(self.tree, ast.Call)))
        lines = list[ast.stmt]()
        for statement in self._flat(function.body):
            lines.append(statement)
            self._bind(statement, function)
            if isinstance(statement, ast.Return):
                break
        self.inner += lines
        returns = [part for one in lines for part in _own(one) if isinstance(part, ast.Return)]
        return returns[0].value if returns == lines[-1:] else None

    def shows(self, node: ast.expr | None) -> bool:
        """True if the script defines all names in an expression."""
        return node is None or all(name in self.bindings or hasattr(builtins, name) for name in free_names(node))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of functions inside it."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for part in ast.iter_child_nodes(node):
            yield from _own(part)
