"""Reads a TRL training script through its syntax tree. Nothing in it is run or imported.

Only values that the script shows are used: constants, names and dictionaries of constants, concatenated strings,
defaults of argparse, and the script's command-line options.
"""

from __future__ import annotations

import ast
import builtins
import operator
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rloo_pipeline.commands.trl_options import option_values
from rloo_pipeline.commands.trl_syntax import UNSHOWN, Binding, bound, free_names, name_of, parameters
from rloo_pipeline.commands.trl_tables import OF_MODEL, POSITIONAL, TALK
from rloo_pipeline.errors import UserError

TRAINERS = ("RLOOTrainer", "GRPOTrainer")
PARSED = ("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args")
OPERATORS: Mapping[type[ast.operator], Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Pow: lambda a, b: a**b,
}
COMPARISONS: Mapping[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS = {
    **{function.__name__: function for function in (bool, float, int, len, max, min, str)},
    "dedent": textwrap.dedent,
}
OTHER_FILES = {
    **dict.fromkeys((".yaml", ".yml"), "options, not a script; name the script first: --from-trl 'SCRIPT --config FILE'"),
    ".ipynb": "a notebook; `jupyter nbconvert --to script` writes the script that --from-trl reads",
}
METHODS = ("strip", "lower", "upper", "split", "replace")
"""Methods of strings."""
Node = TypeVar("Node", bound=ast.AST)


class UnknownValueError(Exception):
    """The text does not show the value of an expression."""


class TrlScript:
    """A script, and the call that makes its trainer.

    Args:
        command: the script's file and options, as after `python`.

    Raises:
        UserError: the file cannot be read, is not Python, or does not make exactly one RLOOTrainer or GRPOTrainer.
    """

    def __init__(self, command: str) -> None:
        try:
            name, *words = shlex.split(command) or [""]
        except ValueError as error:  # a quotation mark without a second one
            raise UserError(f"--from-trl '{command}': cannot be split into words ({error})") from error
        self.path = Path(name)
        try:
            self.text = self.path.read_text(encoding="utf-8")
            if advice := OTHER_FILES.get(self.path.suffix):
                raise UserError(f"--from-trl {name}: {advice}")
            self.tree = ast.parse(self.text)
        except OSError as error:
            raise UserError(f"--from-trl {name}: cannot be read ({error.strerror})") from error
        except (SyntaxError, ValueError) as error:
            raise UserError(f"--from-trl {name}: not valid Python {'.'.join(map(str, sys.version_info[:2]))} ({error})") from error
        self.options = option_values(words)
        self.trainer = self._trainer()
        self.calls = self._calls()
        self.taken: set[int] = set()
        """First lines of the statements that the project takes over."""
        self.statements: list[ast.stmt] = []
        self.bindings: dict[str, list[Binding]] = {}
        self.followed: dict[str, ast.expr | None] = {}
        """Functions of whose results the project is made, with what they return if the script shows it."""
        self.inner: list[ast.stmt] = []
        """Their statements."""
        for function in self._makers():
            self._bind_parameters(function, self.calls)
        for statement in self._flat(self.tree.body):
            self.statements.append(statement)
            self._bind(statement)
        self.arguments = dict(zip(POSITIONAL, self.trainer.args, strict=False)) | self.keywords(self.trainer)

    @property
    def kind(self) -> str:
        """`RLOO` or `GRPO`."""
        return name_of(self.trainer.func).removesuffix("Trainer")

    def _trainer(self) -> ast.Call:
        trainers = [call for call in self._all(ast.Call) if name_of(call.func).endswith("Trainer")]
        found = [call for call in trainers if name_of(call.func) in TRAINERS]
        if len(found) == 1:
            return found[0]
        others = sorted({f"{name_of(call.func)} (line {call.lineno})" for call in trainers})
        seen = f"; it has {', '.join(others)}" if others else ""
        raise UserError(f"{self.path}: one call of {' or '.join(TRAINERS)} is needed{seen}")

    def _makers(self) -> list[ast.FunctionDef]:
        """The functions in which the trainer is made, outermost first."""
        return [function for function in self._all(ast.FunctionDef) if self.trainer in ast.walk(function)]

    def _calls(self) -> list[ast.Call]:
        """The call that makes the trainer, and the calls of the functions around it."""
        makers = {function.name for function in self._makers()}
        inside = [call for call in self._all(ast.Call) if isinstance(call.func, ast.Name) and call.func.id in makers]
        return [self.trainer, *inside]

    def _bind(self, statement: ast.stmt, function: ast.FunctionDef | None = None) -> None:
        for name, value, place in bound(statement):
            self.bindings.setdefault(name, []).append(Binding(statement, value, place, function))

    def _bind_parameters(self, function: ast.FunctionDef, calls: Sequence[ast.Call]) -> None:
        for name, passed in parameters(function, calls).items():
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
        try:
            if isinstance(statement, ast.If):
                return statement.body if self.value(statement.test) else statement.orelse
        except UnknownValueError:
            pass
        return None

    def keywords(self, call: ast.Call) -> dict[str, ast.expr]:
        """Keyword arguments of a call, including those of a `**` dictionary that the script shows.

        Raises:
            UserError: the script does not show the dictionary.
        """
        found: dict[str, ast.expr] = {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = keyword.value
                continue
            entries = self.entries(keyword.value)
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

    def _added(self, entries: ast.Dict, read: ast.expr) -> dict[str, ast.expr]:
        """The entries that lines such as `settings["rate"] = 1e-6` above the one that reads a dictionary add to it."""
        found: dict[str, ast.expr] = {}
        for statement in (*self.statements, *self.inner):
            place = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(place, ast.Subscript) or not isinstance(place.slice, ast.Constant):
                continue
            if statement.lineno < read.lineno and self.resolved(place.value, take=False) is entries:
                found[str(place.slice.value)] = statement.value  # type: ignore[attr-defined]
                self.taken.add(statement.lineno)
        return found

    def at(self, node: ast.AST, problem: str) -> str:
        """Formats a problem with its position in the script."""
        return f"{self.path}, line {getattr(node, 'lineno', '?')}: {problem}"

    def binding(self, name: str, before: int) -> Binding | None:
        """The last statement above a line that binds a name. A function, class or import may also be below."""
        known = self.bindings.get(name, [])
        above = [binding for binding in known if binding.is_seen(before)]
        usable = above or [binding for binding in known if binding.value is None]
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
            if isinstance(several, ast.Tuple | ast.List):
                return self.resolved(several.elts[found.place], take)
            if found.place == 0 and isinstance(several, ast.Call) and name_of(several.func) == "from_pretrained":
                return several  # model, tokenizer = FastLanguageModel.from_pretrained(…)
        elif isinstance(node, ast.Call) and (returned := self._returned(node)) is not node:
            return self.resolved(returned, take)
        return node

    def passed(self, node: ast.expr | None) -> ast.expr | None:
        """What a function that makes the trainer gets for one of its parameters; any other expression as it is."""
        while isinstance(node, ast.Name) and (found := self.binding(node.id, node.lineno)) and found.is_parameter:
            if found.value is None or found.value is UNSHOWN:
                break
            node = found.value
        return node

    def _returned(self, node: ast.expr) -> ast.expr:
        """What a call of a function of the script returns, if the script shows it; otherwise the node."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return node
        function = found.statement if (found := self.binding(node.func.id, node.lineno)) else None
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return node
        if function.name not in self.followed:
            self.followed[function.name] = None  # a function that calls itself shows nothing
            self.followed[function.name] = self._follow(function)
        return self.followed[function.name] or node

    def _follow(self, function: ast.FunctionDef) -> ast.expr | None:
        """Binds the names of a function. Returns the expression that it returns; None if there are several or none."""
        self._bind_parameters(function, list(self._all(ast.Call)))
        lines = list[ast.stmt]()
        for statement in self._flat(function.body):
            lines.append(statement)
            self._bind(statement, function)
        self.inner += lines
        returns = [part for one in lines for part in _own(one) if isinstance(part, ast.Return)]
        return returns[0].value if returns == lines[-1:] else None

    def chosen(self, node: ast.expr) -> ast.expr:
        """The branch of `a if condition else b` that applies, if the script shows the condition."""
        target = self.resolved(node)
        if not isinstance(target, ast.IfExp):
            return target
        try:
            return self.chosen(target.body if self.value(target.test) else target.orelse)
        except UnknownValueError:
            return target

    def argument(self, name: str) -> ast.expr | None:
        """The expression that the script passes as a trainer argument; None if it passes nothing or None."""
        node = self.arguments.get(name)
        target = None if node is None else self.resolved(node)
        return None if isinstance(target, ast.Constant) and target.value is None else target

    def shows(self, node: ast.expr | None) -> bool:
        """True if the script defines all names in an expression."""
        return node is None or all(name in self.bindings or hasattr(builtins, name) for name in free_names(node))

    def value(self, node: ast.expr) -> Any:
        """Evaluates an expression to plain data.

        Raises:
            UnknownValueError: the script does not show it.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(part) for part in node.elts]
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise UnknownValueError
            keys = [self.value(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.Name | ast.IfExp | ast.Call) and (target := self.chosen(node)) is not node:
            return self.value(target)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self.value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._computed(OPERATORS[type(node.op)], node.left, node.right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            return self._computed(COMPARISONS[type(node.ops[0])], node.left, node.comparators[0])
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
        """Applies a function without side effects to values."""
        values = [self.value(node) for node in nodes]
        try:
            return function(*values)
        except (TypeError, ValueError, LookupError, ArithmeticError):  # such as None for an option without a value
            raise UnknownValueError from None

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
        if (key := self.value(node.slice)) not in entries:
            raise UnknownValueError
        return self.value(entries[key])

    def _attribute(self, node: ast.Attribute) -> Any:
        """Evaluates `torch.bfloat16`, a command-line option, or a field of a class of the script or of its object."""
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        shown = self.settings(node.value)
        if node.attr not in shown and self.is_parsed(node.value):
            return self._option(node.attr)
        return self.value(shown.get(node.attr, UNSHOWN))

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
        for call in self._all(ast.Call):
            if name_of(call.func) == "add_argument":
                flags = [str(flag.value) for flag in call.args if isinstance(flag, ast.Constant)]
                names, keywords = {flag.lstrip("-").replace("-", "_") for flag in flags}, self.keywords(call)
                if name == self.value(keywords["dest"]) if "dest" in keywords else name in names:
                    given = [self.options[flag] for flag in names & self.options.keys()]
                    return given[0] if given else self._default(keywords)
        for one in self._all(ast.ClassDef):
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

    def _all(self, kind: type[Node]) -> Iterator[Node]:
        """All nodes of a kind."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kind))

    def is_parsed(self, node: ast.expr) -> bool:
        """True if a name holds the parsed command-line options."""
        target = node
        while isinstance(target, ast.Name):
            found = self.binding(target.id, target.lineno)
            if found is None or found.value is None:
                return False
            target = found.value
            if isinstance(target, ast.Tuple | ast.List) and found.place is not None:
                target = target.elts[found.place]
        return isinstance(target, ast.Call) and self.parses(target)

    def parses(self, call: ast.Call) -> bool:
        """True if a call returns the parsed command-line options, directly or through a function of the script."""
        found = self.binding(name, call.lineno) if (name := name_of(call.func)) not in PARSED else None
        if found is None or not isinstance(found.statement, ast.FunctionDef):
            return name in PARSED
        return any(isinstance(part, ast.Call) and name_of(part.func) in PARSED for part in ast.walk(found.statement))

    def _called(self, node: ast.Call) -> Any:
        """Evaluates `dict(a=1)`, `getattr(torch, name)`, `len(names)`, `textwrap.dedent(text)` and `text.strip()`."""
        name = name_of(node.func)
        if name == "dict" and not node.args:
            return {key: self.value(value) for key, value in self.keywords(node).items()}
        if node.keywords:
            raise UnknownValueError
        if name == "getattr" and len(node.args) > 1 and ast.unparse(node.args[0]) == "torch":
            return self.value(node.args[1])
        if name == "dedent" or (name in FUNCTIONS and isinstance(node.func, ast.Name)):
            return self._computed(FUNCTIONS[name], *node.args)
        if name in METHODS and isinstance(node.func, ast.Attribute):
            return self._computed(getattr(str, name), node.func.value, *node.args)
        raise UnknownValueError

    def config_options(self) -> dict[str, ast.expr | Any]:
        """Options of the RLOOConfig or GRPOConfig, as expressions or as values from the script's command line."""
        node = self.arguments.get("args")
        if node is None:
            return {}
        target, found = self.resolved(node), dict[str, ast.expr | Any]()
        for one in self._all(ast.ClassDef):
            if any(name_of(base) == f"{self.kind}Config" for base in one.bases):
                found |= self.fields(one)
        if isinstance(target, ast.Call) and name_of(target.func).endswith("Config"):
            found |= dict(zip(("output_dir",), target.args, strict=False)) | self.keywords(target)
        elif self.is_parsed(node):
            others = {
                part.attr
                for part in self._all(ast.Attribute)
                if ast.unparse(part.value) != ast.unparse(node) and self.is_parsed(part.value)
            }
            found |= {name: value for name, value in self.options.items() if name not in others}
        else:
            raise UserError(self.at(node, "the options are not in a call of RLOOConfig or GRPOConfig in this file"))
        for statement in (*self.statements, *self.inner):  # config.beta = 0.1
            place = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(place, ast.Attribute) and self._is_same(place.value, node, target):
                found[place.attr] = statement.value  # type: ignore[attr-defined]
                self.taken.add(statement.lineno)
        return found

    def _is_same(self, one: ast.expr, node: ast.expr, target: ast.expr) -> bool:
        """True if an expression is written like another, or stands for the same object as it."""
        return ast.unparse(one) == ast.unparse(node) or self.resolved(one, take=False) is target

    def left(self) -> Iterator[ast.stmt]:
        """Statements that the project does not take over, except imports and statements about the trainer."""
        about = {name for name, known in self.bindings.items() if any(self._is_training(one.value) for one in known)}
        for statement in (*self.statements, *self.inner):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            trains = names & about or "__name__" in names or any(node in self.calls for node in ast.walk(statement))
            trains = trains and not self._makes_another(statement)
            is_taken = statement.lineno in self.taken or isinstance(statement, kinds) or _only_shows(statement)
            if not (is_taken or self.is_afterwards(statement) or (trains and not self._sets(statement))):
                yield statement

    def is_afterwards(self, statement: ast.stmt) -> bool:
        """True if a statement is below the one that trains, in the same function."""
        trains = [call.lineno for call in self._all(ast.Call) if name_of(call.func) == "train" and call.lineno >= self.trainer.lineno]
        inside = [function for function in self._makers() if function.lineno < min(trains, default=0) <= (function.end_lineno or 0)]
        end = inside[-1].end_lineno if inside else None
        return bool(trains) and min(trains) < statement.lineno <= (end or statement.lineno)

    def _makes_another(self, statement: ast.stmt) -> bool:
        """True if a statement makes another trainer, such as one that fine-tunes the model first."""
        calls = [part for part in ast.walk(statement) if isinstance(part, ast.Call) and part not in self.calls]
        return any(name_of(call.func).endswith("Trainer") for call in calls)

    def _sets(self, statement: ast.stmt) -> bool:
        """True if a statement sets an option or adds a callback."""
        args = ast.unparse(self.arguments.get("args", UNSHOWN))
        return any(
            (isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == args)
            or (isinstance(part, ast.Call) and name_of(part.func) == "add_callback")
            for part in ast.walk(statement)
        )

    def _is_training(self, value: ast.expr | None) -> bool:
        """True if a value is a trainer, its options, or an argument parser."""
        if not isinstance(value, ast.Call):
            return False
        return name_of(value.func).endswith(("Trainer", "Config", "Parser")) or self.parses(value)


def _only_shows(statement: ast.stmt) -> bool:
    """True for an expression alone on its line, such as text or `rows[0]`, for a call that prints, and for what has no
    effect on the training, such as `os.environ[…] = …`.
    """
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]).startswith("os.environ[")
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.Pass | ast.Return | ast.Global | ast.Delete)
    return not isinstance(statement.value, ast.Call) or name_of(statement.value.func) in TALK


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, without those of functions inside it."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for part in ast.iter_child_nodes(node):
            yield from _own(part)
