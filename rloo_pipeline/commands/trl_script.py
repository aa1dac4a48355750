"""Reads a TRL training script: the call that makes its trainer, its options, and what a project leaves out."""

import ast
import json
import re
import shlex
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rloo_pipeline.commands import trl_cli
from rloo_pipeline.commands.trl_syntax import UNSHOWN, all_nodes, name_of
from rloo_pipeline.commands.trl_tables import POSITIONAL, TALK
from rloo_pipeline.commands.trl_values import ScriptValues
from rloo_pipeline.config.section import JSON
from rloo_pipeline.errors import UserError

TRAINERS = ("RLOOTrainer", "GRPOTrainer")
COPIES = ("replace", "copy", "deepcopy")
"""Functions that return a copy of their first argument; `dataclasses.replace` changes the fields that it is given."""
RELATIVE = re.compile(r"(?m)^(\s*from\s+)(\.+)([\w.]*)(?=\s+import\b)")
PADDING = {"pad_token", "pad_token_id", "padding_side"}
"""Attributes of a tokenizer that change nothing here."""
OF_TOKENIZER = (
    *("get_chat_template", "setup_chat_format", "clone_chat_template", "add_tokens", "add_special_tokens"),
    "add_new_tokens",
)
"""Functions that change the vocabulary or the chat template of a tokenizer."""
OF_VOCABULARY = re.compile(r"chat_template|(bos|cls|eos|mask|sep|unk)_token(_id)?|(additional_|extra_)?special_tokens")
"""Attributes that change the vocabulary or the chat template of a tokenizer."""
OTHER_CELLS = (
    *("%%!", "%%bash", "%%cmd", "%%file", "%%html", "%%javascript", "%%js", "%%latex", "%%markdown", "%%perl"),
    *("%%ruby", "%%script", "%%sh", "%%svg", "%%sx", "%%system", "%%writefile"),
)
"""Beginnings, in lower case, of cells of a notebook that are not Python."""
MAGIC = re.compile(r"(?m)^([ \t]*)[%!](?:.*\\\n)*.*")
"""A line of a notebook that is a command of IPython or of a shell."""


class TrlScript(ScriptValues):
    """A script, and the call that makes its trainer.

    Args:
        command: the script's file and options, with or without `python` or a launcher, or a command of TRL.

    Raises:
        UserError: the file cannot be read, is not Python, or does not make exactly one RLOOTrainer or GRPOTrainer.
    """

    def __init__(self, command: str) -> None:
        self.launch: JSON = {}
        """`num_processes`, if a launcher before the script says it."""
        try:
            # a comment may follow the command; shlex would also end `data#part` there
            name, *words = shlex.split(command, comments=not re.search(r"\S#", command)) or [""]
        except ValueError as error:  # a quotation mark without a second one
            raise UserError(f"--from-trl '{command}': cannot be split into words ({error})") from error
        if of_trl := trl_cli.split([name, *words]):
            kind, words = of_trl
            path, options = Path(f"trl {kind.lower()}"), trl_cli.option_values(words)
            self.text = trl_cli.script(kind, options)
            tree = ast.parse(self.text)
        else:
            (name, *words), self.launch = trl_cli.without_launcher([name, *words])
            path, options = Path(name), trl_cli.option_values(words)
            self.text, tree = read(path)
        self.trainer = _trainer(path, tree)
        makers = [function for function in all_nodes(tree, ast.FunctionDef) if self.trainer in ast.walk(function)]
        """The functions in which the trainer is made, outermost first."""
        names = {function.name for function in makers}
        inside = [
            call for call in all_nodes(tree, ast.Call) if isinstance(call.func, ast.Name) and call.func.id in names
        ]
        super().__init__(path, tree, options, [self.trainer, *inside], makers)
        calls = [call.lineno for call in all_nodes(tree, ast.Call) if name_of(call.func) == "train"]
        trains = min((line for line in calls if line >= self.trainer.lineno), default=sys.maxsize)
        of_makers = [(function.lineno, function.end_lineno or 0) for function in makers]
        ends = [end for begin, end in of_makers if begin < trains <= end]
        self.afterwards = range(trains + 1, (ends or [sys.maxsize])[-1] + 1)
        """The lines below the one that trains, in the same function."""
        self.configs: list[ast.expr] = []
        """Expressions of the trainer's options, and of those that they are a copy of."""
        self.arguments = dict(zip(POSITIONAL, self.trainer.args, strict=False)) | self.keywords(self.trainer)

    @property
    def kind(self) -> str:
        """`RLOO` or `GRPO`."""
        return name_of(self.trainer.func).removesuffix("Trainer")

    def of_others(self) -> Iterator[tuple[str, str]]:
        """Yields the classes of the trainer and its options that are not those of TRL or Unsloth, each with its
        module.
        """
        for name in (f"{self.kind}Trainer", f"{self.kind}Config"):
            found = {one.name: "the script" for one in all_nodes(self.tree, ast.ClassDef) if one.name == name}
            for one in all_nodes(self.tree, ast.ImportFrom):
                if any((alias.asname or alias.name) == name for alias in one.names):
                    found[str(one.module)] = str(one.module)
            if found and not any(module.partition(".")[0] in ("trl", "unsloth") for module in found):
                yield name, " or ".join(found.values())

    def argument(self, name: str) -> ast.expr | None:
        """The expression that the script passes as a trainer argument; None if it passes nothing or None."""
        node = self.arguments.get(name)
        target = None if node is None else self.resolved(node)
        target = node if target is UNSHOWN else target
        return None if isinstance(target, ast.Constant) and target.value is None else target

    def config_options(self) -> dict[str, ast.expr | Any]:
        """Options of the RLOOConfig or GRPOConfig, as expressions or as values from the script's command line."""
        node = self.arguments.get("args")
        return self.launch if node is None else self._options(node, self.trainer)

    def _options(self, node: ast.expr, reader: ast.Call) -> dict[str, ast.expr | Any]:
        """The options that an expression stands for where a call reads it."""
        self.configs.append(node)
        target, found = self.resolved(node), dict[str, ast.expr | Any](self.launch)
        name = f"{self.kind}Config"
        if isinstance(target, ast.Call) and name_of(target.func) in COPIES and target.args:
            found |= self._options(target.args[0], target) | self.keywords(target)
            return self._with_lines(node, reader, found)
        is_own = not isinstance(target, ast.Call) or name_of(target.func) != name
        for one in all_nodes(self.tree, ast.ClassDef):
            if is_own and any(name_of(base) == name for base in one.bases):
                found |= self.fields(one)
        if isinstance(target, ast.Call) and name_of(target.func).endswith("Config"):
            found |= dict(zip(("output_dir",), target.args, strict=False)) | self.keywords(target)
        elif self.is_parsed(node):
            others = {
                part.attr
                for part in all_nodes(self.tree, ast.Attribute)
                if isinstance(part.ctx, ast.Load)
                and self.origin(part.value) != self.origin(node)
                and self.is_parsed(part.value)
            }
            found |= {name: value for name, value in self.options.items() if name not in others}
        else:
            raise UserError(self.at(node, f"write the call of {self.kind}Config here; the script does not show it"))
        return self._with_lines(node, reader, found)

    def _with_lines(self, node: ast.expr, reader: ast.Call, found: dict[str, Any]) -> dict[str, ast.expr | Any]:
        """Options, with what lines such as `config.beta = 0.1` set before a call reads them."""
        for call in map(self._option_call, self.statements):
            function = call and self.function_of(call)
            if call and function and _sets_attributes(function):
                self._returned(call)  # which reads its lines, too
        made = self.when(reader.end_lineno or 0)  # which may call functions that set options
        for place, value in self.assigned(ast.Attribute):  # config.beta = 0.1
            if self.when(place.lineno)[: len(made)] <= made and self.is_same(place.value, node):
                found[place.attr] = value
                self.taken.add(place.lineno)
        return found

    def _option_call(self, node: ast.AST) -> ast.Call | None:
        """The function call in a line, if it may change the trainer's options: `set_up(config)`, also with `x =` before
        it, or `config.set_training(…)`.
        """
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or call in self.calls or name_of(call.func) in COPIES:
            return None
        if not isinstance(node, ast.Expr):  # a call with a result may do something else
            function = self.function_of(call)
            if function:
                sets = _sets_attributes(function, {argument.arg for argument in function.args.args})
            else:
                sets = name_of(call.func).startswith(("set_", "setup", "update", "apply"))
            if not sets or not isinstance(node, ast.Assign | ast.AnnAssign):
                return None
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("set_"):
            given.append(call.func.value)
        names = [part for part in given if isinstance(part, ast.Name)]
        return call if any(self.is_same(name, args) for name in names for args in self.configs) else None

    def loops(self) -> list[ast.For | ast.While]:
        """Loops that may train several times."""
        loops = (node for node in ast.walk(self.tree) if isinstance(node, ast.For | ast.While))
        return [loop for loop in loops if any(part in self.calls or self._trains(part) for part in ast.walk(loop))]

    def _trains(self, node: ast.AST) -> bool:
        """True for `trainer.train()`, and for `self.trainer.train()`, even if that may be another trainer."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "train":
            return False
        trainer = node.func.value
        return self.resolved(trainer, take=False) is self.trainer or name_of(trainer).lower().endswith("trainer")

    def left(self) -> Iterator[ast.stmt]:
        """Statements that the project does not take over, except imports and statements about the trainer."""
        about = {name for name, known in self.bindings.items() if any(self._is_training(one.value) for one in known)}
        changed = {name for one in ("model", "processing_class") for name in self._objects(one)} - about
        for statement in (*self.statements, *self.inner):
            names = _names(statement)
            kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            # a line that reads an option may also change the model
            trains = (names & about and not names & changed) or "__name__" in names
            trains = trains or any(node in self.calls for node in ast.walk(statement))
            trains = trains and not self._makes_another(statement)
            is_taken = statement.lineno in self.taken and not self._changes_tokenizer(statement)
            is_taken = is_taken or isinstance(statement, kinds) or _only_shows(statement)
            if not (is_taken or statement.lineno in self.afterwards or (trains and not self._sets(statement))):
                yield statement

    def advice_on(self, statement: ast.stmt) -> str:
        """How the run gets what a statement that the project does not take over changes; empty if nothing is known."""
        if self._changes_tokenizer(statement):
            return "save the tokenizer into a copy of the model's folder, and set model.name_or_path to it"
        if self._makes_another(statement):
            return "trains first: set model.name_or_path to the model that it saves, or set warmstart.sft"
        return ""

    def _objects(self, argument: str) -> set[str]:
        """The variables in a trainer argument, without constants, and the functions and classes that make it."""
        node = self.arguments.get(argument, UNSHOWN)
        called = [call.func for call in all_nodes(node, ast.Call)]
        makers = [one for one in called if isinstance(one, ast.Name) or name_of(one) == "from_pretrained"]
        others = {name for maker in makers for name in _names(maker)}
        names = [name for name in all_nodes(node, ast.Name) if name.id not in others]
        return {name.id for name in names if not isinstance(self.resolved(name, take=False), ast.Constant)}

    def _changes_tokenizer(self, statement: ast.stmt) -> bool:
        """True if a statement changes the tokenizer of the trainer. Such a line that makes data is copied, but does not
        change the tokenizer of the run.
        """
        return "processing_class" in self.arguments and any(
            (
                isinstance(part.ctx, ast.Store) and bool(OF_VOCABULARY.fullmatch(part.attr))
                if isinstance(part, ast.Attribute)
                else isinstance(part, ast.Call) and name_of(part.func) in OF_TOKENIZER
            )
            and not self._is_of_another(part)
            for part in ast.walk(statement)
        )

    def _is_of_another(self, node: ast.AST) -> bool:
        """True if a node names a tokenizer that the script loads beside that of the trainer."""
        own = self.arguments["processing_class"]
        names = [] if _names(own) & _names(node) else all_nodes(node, ast.Name)
        found = [self.resolved(one, take=False) for one in (own, *names)]
        loads = [isinstance(one, ast.Call) and name_of(one.func) == "from_pretrained" for one in found]
        return loads[0] and any(loads[1:]) and found[0] not in found[1:]

    def _makes_another(self, statement: ast.stmt) -> bool:
        """True if a statement makes another trainer, such as one that fine-tunes the model first."""
        calls = [part for part in ast.walk(statement) if isinstance(part, ast.Call) and part not in self.calls]
        return any(name_of(call.func).endswith("Trainer") for call in calls)

    def _sets(self, statement: ast.stmt) -> bool:
        """True if a statement may set an option, adds a callback, or changes the trainer after it was made."""
        for call in filter(None, map(self._option_call, ast.walk(statement))):
            function = self.function_of(call)  # None for the function of a module
            if function is None or (_sets_attributes(function) and function.name not in self.followed):
                return True
        makes = any(part in self.calls for part in ast.walk(statement))
        adds = any(name_of(call.func) == "add_callback" for call in all_nodes(statement, ast.Call))
        return adds or _sets_attributes(statement, [*map(ast.unparse, self.configs)] if makes else None)

    def _is_training(self, value: ast.expr | None) -> bool:
        """True if a value is a trainer, its options, or an argument parser."""
        is_made = isinstance(value, ast.Call) and name_of(value.func).endswith(("Trainer", "Config", "Parser"))
        return is_made or self.is_parsed(value)


def read(path: Path) -> tuple[str, ast.Module]:
    """The text and the syntax tree of a script.

    Raises:
        UserError: the file cannot be read, or is not Python.
    """
    if path.suffix in (".yaml", ".yml"):
        advice = "write the whole command: --from-trl 'trl grpo --config FILE', or a script's"
        raise UserError(f"--from-trl {path}: options; {advice}")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = _code(path, text)
        text = RELATIVE.sub(lambda found: found[1] + _absolute(path, len(found[2]), found[3]), text)
        return text, ast.parse(text, str(path))
    except OSError as error:
        raise UserError(f"--from-trl {path}: cannot be read ({error.strerror})") from error
    except (SyntaxError, ValueError) as error:
        version = ".".join(map(str, sys.version_info[:2]))
        advice = "correct it, or install this package with the script's Python"
        raise UserError(f"--from-trl {path}: not valid Python {version} ({error}); {advice}") from error


def _code(path: Path, text: str) -> str:
    """The Python code in the cells of a notebook, without commands of IPython and of a shell.

    Raises:
        UserError: the file is not a notebook.
    """
    try:
        texts = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"--from-trl {path}: not a notebook of format 4; save it as a Python script") from error
    return "\n\n".join(
        map(_without_magic, (text for text in texts if not text.lower().lstrip().startswith(OTHER_CELLS)))
    )


def _without_magic(cell: str) -> str:
    """A cell with `pass` for each command of IPython or of a shell: lines that are not valid Python where they stand,
    unlike the same lines inside a text or an expression.
    """
    while True:
        try:
            ast.parse(cell)
        except SyntaxError as error:
            at = sum(len(line) + 1 for line in cell.split("\n")[: (error.lineno or 1) - 1])
            command = next((one for one in MAGIC.finditer(cell) if one.start() <= at <= one.end()), None)
            if command is None:
                return cell
            cell = f"{cell[: command.start()]}{command[1]}pass{cell[command.end() :]}"
        else:
            return cell


def _absolute(path: Path, level: int, module: str) -> str:
    """The absolute name of a module that a file imports by a relative one, since copies are in another folder. The
    relative one stays if Python cannot import a folder of that name.
    """
    package = root = path.resolve().parents[level - 1]
    while root == package or (root / "__init__.py").is_file():
        root = root.parent
    names = [*package.relative_to(root).parts, *filter(None, module.split("."))]
    return ".".join(names) if all(map(str.isidentifier, names)) else "." * level + module


def _trainer(path: Path, tree: ast.Module) -> ast.Call:
    """The call that makes the trainer.

    Raises:
        UserError: there is none, or several.
    """
    trainers = [call for call in all_nodes(tree, ast.Call) if name_of(call.func).endswith("Trainer")]
    found = [call for call in trainers if name_of(call.func) in TRAINERS]
    if len(found) == 1:
        return found[0]
    others = sorted({f"{name_of(call.func)} (line {call.lineno})" for call in trainers})
    seen = f"; it has {', '.join(others)}" if others else ""
    raise UserError(f"{path}: one call of {' or '.join(TRAINERS)} is needed{seen}")


def _names(node: ast.AST | None) -> set[str]:
    return {part.id for part in all_nodes(node, ast.Name)} if node else set()


def _sets_entries(node: ast.AST) -> bool:
    """True for `vars(config)["beta"]` and `config.__dict__["beta"]` where they are set, and for `….update(…)` and
    `….setdefault(…)`.
    """
    match node:
        case ast.Subscript(ast.Call(ast.Name("vars")) | ast.Attribute(attr="__dict__"), ctx=ast.Store()):
            return True
        case ast.Call(
            ast.Attribute(ast.Call(ast.Name("vars")) | ast.Attribute(attr="__dict__"), "update" | "setdefault")
        ):
            return True
    return False


def _sets_attributes(node: ast.AST, of: Collection[str] | None = None) -> bool:
    """True if lines in a node set attributes, or if `of` is given, those of variables with these names."""
    changed = (
        part.value if isinstance(part, ast.Attribute) else next(iter(part.args), part)
        for part in ast.walk(node)
        if (isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
        or (isinstance(part, ast.Call) and name_of(part.func) == "setattr")
    )
    entries = any(map(_sets_entries, ast.walk(node)))
    return entries or any(of is None or ast.unparse(variable) in of for variable in changed)


def _only_shows(statement: ast.stmt) -> bool:
    """True for an expression alone on its line, such as text or `rows[0]`, for a call that prints, and for what has no
    effect on the training, such as `os.environ[…] = …` and `tokenizer.pad_token = …`.
    """
    kinds = ast.Attribute | ast.Name | ast.Subscript
    stored = [part for part in ast.walk(statement) if isinstance(part, kinds) and isinstance(part.ctx, ast.Store)]
    if stored and all(isinstance(part, ast.Attribute) and part.attr in PADDING for part in stored):
        return not any(isinstance(part, ast.Expr) for part in ast.walk(statement))
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]).startswith("os.environ[")
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.Pass | ast.Return | ast.Global | ast.Delete)
    return not isinstance(statement.value, ast.Call) or name_of(statement.value.func) in TALK
