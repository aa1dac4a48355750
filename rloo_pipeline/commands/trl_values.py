"""Evaluates expressions of a script through its syntax tree. Nothing in it is run or imported.

Only values that the script shows are used: constants, names and dictionaries of constants, results of its functions,
concatenated strings, defaults of argparse, and the script's command-line options.
"""

import ast
import operator
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rloo_pipeline.commands.trl_names import ScriptNames
from rloo_pipeline.commands.trl_options import shown
from rloo_pipeline.commands.trl_syntax import UNSHOWN, all_nodes, bound, name_of
from rloo_pipeline.commands.trl_tables import OF_MODEL
from rloo_pipeline.errors import UserError

PARSED = ("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args")
OPERATORS = {"Mult": "mul", "Div": "truediv", "USub": "neg", "NotEq": "ne", "LtE": "le", "GtE": "ge", "IsNot": "is_not"}
"""Functions in `operator`, by the names of ast's classes; those of others are these names in lower case."""
FUNCTIONS = {
    **{function.__name__: function for function in (bool, float, int, len, max, min, str)},
    "dedent": textwrap.dedent,
}
METHODS = ("strip", "lower", "upper", "split", "replace")
"""Methods of strings."""


class UnknownValueError(Exception):
    """The text does not show the value of an expression."""

    node: ast.expr | None = None
    """The innermost expression that has no value."""


class ScriptValues(ScriptNames):
    """The values of the expressions of a script."""

    def keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """Keyword arguments of a call, including those of a `**` dictionary that the script shows.

        Raises:
            UserError: the script does not show the dictionary.
        """
        found: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            entries = self.entries(keyword.value) if keyword.arg is None else {keyword.arg: keyword.value}
            if entries is None:
                raise UserError(self.at(keyword.value, "write the arguments out; the script does not show them"))
            found |= entries
        return found

    def entries(self, node: ast.expr) -> dict[str, ast.expr] | None:
        """The values of a dictionary by key; None if the script does not show its keys."""
        value = self.resolved(node)
        if isinstance(value, ast.Call) and name_of(value.func) == "dict" and not value.args:
            return self.keywords(value)
        if isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            names = (str(key.value) for key in value.keys if isinstance(key, ast.Constant))
            return dict(zip(names, value.values, strict=True)) | self._added(value, node)
        return None

    def elements(self, node: ast.expr) -> list[ast.expr] | None:
        """The elements of a list or tuple, or of `[TABLE[name] for name in names]`; None if the script does not show
        them.

        Raises:
            UserError: the table has no such entry.
        """
        match node:
            case ast.List() | ast.Tuple():
                return node.elts
            case ast.ListComp(
                elt=ast.Subscript(table, ast.Name(name)) | ast.Call(ast.Attribute(table, "get"), [ast.Name(name), *_]),
                generators=[ast.comprehension(ast.Name(variable), iterated, [])],
            ) if name == variable and (entries := self.entries(table)):
                try:
                    names = self.value(iterated)
                except UnknownValueError:
                    return None
                # a single word on the command line is a string
                names = [*map(str, names)] if isinstance(names, list) else [str(names)]
                if missing := [one for one in names if one not in entries]:
                    problem = f"{ast.unparse(table)} has no {missing[0]}; name one of {', '.join(entries)}"
                    raise UserError(self.at(node, problem))
                return [entries[one] for one in names]
        return None

    def _added(self, entries: ast.Dict, read: ast.expr) -> dict[str, ast.expr]:
        """The entries that lines such as `settings["rate"] = 1e-6` above the one that reads a dictionary add to it."""
        found: dict[str, ast.expr] = {}
        for place, value in self.assigned(ast.Subscript):
            if place.lineno >= read.lineno or not isinstance(place.slice, ast.Constant):
                continue
            if self.resolved(place.value, take=False) is entries:
                found[str(place.slice.value)] = value
                self.taken.add(place.lineno)
        return found

    def chosen(self, node: ast.expr) -> ast.expr:
        """The branch of `a if condition else b` that applies, if the script shows the condition."""
        target = self.resolved(node)
        if not isinstance(target, ast.IfExp):
            return target
        holds = self.holds(target.test)
        return target if holds is None else self.chosen(target.body if holds else target.orelse)

    def holds(self, condition: ast.expr) -> bool | None:
        """True if a condition holds; None if the script does not show it."""
        try:
            return bool(self.value(condition))
        except UnknownValueError:
            return None

    def value(self, node: ast.expr) -> Any:
        """Evaluates an expression to plain data.

        Raises:
            UnknownValueError: the script does not show it.
        """
        try:
            return self._value(node)
        except UnknownValueError as error:
            is_entry = isinstance(node, ast.Subscript) and error.node is node.value  # os.environ["RATE"]
            if (error.node is None or is_entry) and node is not UNSHOWN:
                error.node = node
            raise

    def hidden(self, node: ast.expr) -> str:
        """Names the part of an expression whose value the script does not show, and its line."""
        try:
            self.value(node)
        except UnknownValueError as error:
            node = error.node or node
        found = self.binding(node.id, node.lineno) if isinstance(node, ast.Name) else None
        line = found.statement.lineno if found else node.lineno
        return f"the script does not show its value ({self.path.name}:{line}: {shown(ast.unparse(node))})"

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(part) for part in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self.value(key) for key in node.keys if key is not None]
            return _applied(dict, zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.Name | ast.IfExp | ast.Call) and (target := self.chosen(node)) is not node:
            return self.value(target)
        if isinstance(node, ast.UnaryOp):
            return self._computed(_operator(node.op), node.operand)
        if isinstance(node, ast.BinOp):
            return self._computed(_operator(node.op), node.left, node.right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._computed(_operator(node.ops[0]), node.left, node.comparators[0])
        if isinstance(node, ast.BoolOp):
            return self._either(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None:
            return self.value(node.value)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        raise UnknownValueError

    def _computed(self, function: Callable[..., Any], *nodes: ast.expr) -> Any:
        """Applies a function without side effects to the values of expressions."""
        return _applied(function, *[self.value(node) for node in nodes])

    def _either(self, node: ast.BoolOp) -> Any:
        """Evaluates `a or b` and `a and b`."""
        for part in node.values[:-1]:
            if bool(value := self.value(part)) is isinstance(node.op, ast.Or):
                return value
        return self.value(node.values[-1])

    def _item(self, node: ast.Subscript) -> Any:
        """Evaluates `settings["rate"]`, of which the script may show only this entry."""
        entries = self.entries(node.value)
        if entries is None:
            return self._computed(operator.getitem, node.value, node.slice)
        if (key := str(self.value(node.slice))) not in entries:
            raise UnknownValueError
        return self.value(entries[key])

    def _attribute(self, node: ast.Attribute) -> Any:
        """Evaluates `torch.bfloat16`, a command-line option, or a field of a class of the script or of its object."""
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        for place, value in reversed([*self.assigned(ast.Attribute)]):
            is_above = place.attr == node.attr and self.when(place.lineno) < self.when(node.lineno)
            if is_above and self.is_same(place.value, node.value):
                self.taken.add(place.lineno)
                return self.value(value)
        fields = self.settings(node.value)
        if node.attr not in fields and self.is_parsed(node.value):
            return self._option(node.attr)
        return self.value(fields.get(node.attr, UNSHOWN))

    def settings(self, node: ast.expr) -> dict[str, ast.expr]:
        """The fields of a class of the script or of an object, as far as the script shows them."""
        target = self.resolved(node, take=False)
        made = target.func if isinstance(target, ast.Call) else target
        found = self.binding(made.id, made.lineno) if isinstance(made, ast.Name) else None
        fields = self.fields(found.statement) if found and isinstance(found.statement, ast.ClassDef) else {}
        if not isinstance(target, ast.Call) or not isinstance(made, ast.Name):
            return fields
        if target.args or any(keyword.arg is None for keyword in target.keywords):
            return {}
        return fields | self.keywords(target)

    def _option(self, name: str) -> Any:
        """The value of an option: from the command line, or its default."""
        if name in self.options:
            return self.options[name]
        for call in all_nodes(self.tree, ast.Call):
            if name_of(call.func) == "add_argument":
                flags = [str(flag.value) for flag in call.args if isinstance(flag, ast.Constant)]
                names = {flag.lstrip("-").replace("-", "_") for flag in flags}
                if name in ([self.value(one.value) for one in call.keywords if one.arg == "dest"] or names):
                    given = [self.options[flag] for flag in names & self.options.keys()]
                    return given[0] if given else self._default(self.keywords(call))
        for one in all_nodes(self.tree, ast.ClassDef):
            if (default := self.fields(one).get(name)) is not None:
                return self.value(default)
        if name in OF_MODEL:
            return OF_MODEL[name]
        raise UnknownValueError

    def _default(self, keywords: Mapping[str, ast.expr]) -> Any:
        """The default of an argparse option."""
        action = self.value(keywords.get("action", ast.Constant("store")))
        if "default" in keywords:
            return self.value(keywords["default"])
        if "required" in keywords and self.value(keywords["required"]):
            raise UnknownValueError
        return {"store_true": False, "store_false": True}.get(action)

    def fields(self, one: ast.ClassDef) -> dict[str, ast.expr]:
        """The defaults of a dataclass, by field."""
        found: dict[str, ast.expr] = {}
        for statement in one.body:
            for name, value, place in bound(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ():
                if value is None or place is not None:
                    continue
                if isinstance(value, ast.Call) and name_of(value.func) == "field":
                    keywords = self.keywords(value)
                    made = keywords.get("default_factory")
                    value = keywords.get("default", made.body if isinstance(made, ast.Lambda) else UNSHOWN)
                found[name] = value
        return found

    def is_parsed(self, node: ast.expr | None) -> bool:
        """True if an expression is the parsed command-line options or a part of them, which a call returns directly or
        through a function of the script.
        """
        node = node and self.origin(node)[0]
        if not isinstance(node, ast.Call):
            return False
        function = self.function_of(node)
        calls = [node, *all_nodes(function, ast.Call)] if function else [node]
        return any(name_of(call.func) in PARSED for call in calls)

    def _called(self, node: ast.Call) -> Any:
        """Evaluates `dict(a=1)`, `getattr(torch, name)`, `hasattr(options, "a")`, `len(names)`, `textwrap.dedent(text)`
        and `text.strip()`.
        """
        name = name_of(node.func)
        if name == "dict" and not node.args:
            return {key: self.value(value) for key, value in self.keywords(node).items()}
        if node.keywords:
            raise UnknownValueError
        is_field = isinstance(node.func, ast.Name) and len(node.args) > 1
        if is_field and (name == "getattr" or (name == "hasattr" and self.is_parsed(node.args[0]))):
            field = ast.Attribute(node.args[0], str(self.value(node.args[1])), ast.Load())
            found = self.value(ast.copy_location(field, node))
            return name == "hasattr" or found
        if name == "dedent" or (name in FUNCTIONS and isinstance(node.func, ast.Name)):
            return self._computed(FUNCTIONS[name], *node.args)
        if name in METHODS and isinstance(node.func, ast.Attribute):
            return self._computed(getattr(str, name), node.func.value, *node.args)
        raise UnknownValueError


def _operator(node: ast.AST) -> Callable[..., Any]:
    """The function of an operator, which raises TypeError if there is none, as for `|`."""
    name = type(node).__name__
    if name in ("In", "NotIn"):
        return lambda a, b: (a in b) is (name == "In")
    name = OPERATORS.get(name, name.lower())
    found: Any = getattr(operator, name, None) or getattr(operator, f"{name}_", operator.index)
    return found  # type: ignore[no-any-return]


def _applied(function: Callable[..., Any], *values: Any) -> Any:
    """Applies a function to values that it may not take, such as None for an option without a value."""
    try:
        return function(*values)
    except (TypeError, ValueError, LookupError, ArithmeticError):
        raise UnknownValueError from None
