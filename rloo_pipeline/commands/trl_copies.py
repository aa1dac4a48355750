"""Copies the parts of a TRL script that a project keeps: functions, and the lines that make the dataset.

A copy has the statements that the part depends on, in the order of the script, and nothing that trains.
"""

import ast
import builtins
import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rloo_pipeline.commands.trl_draws import draws, has_no_seed, other_rows, seeds
from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.commands.trl_syntax import bound, free_names, name_of, own_names, scopes
from rloo_pipeline.commands.trl_values import UnknownValueError
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.frame import templates_of

LOADERS = ("load_dataset", "load_from_disk", "from_list", "from_dict", "from_generator", "from_pandas", "from_json")
"""Functions of `datasets` that read rows. Statements that depend on them stay inside a function."""
FORMATS = ("csv", "json", "parquet", "text", "arrow", "pandas", "xml", "webdataset", "imagefolder", "audiofolder")
"""First arguments of `load_dataset` that name a format, even beside a folder of this name."""
CHANGING = ("append", "extend", "insert", "add", "update", "sort", "reverse")
"""Methods that change a list, a set or a dict."""
OWN = {"train", "held_out", "rows", "_split"}
"""Names of the functions in data.py. Variables inside them may have these names too."""
DATA_FILE = re.compile(r"(?!/|~|\w+:)[^\s]*\w\.(csv|tsv|jsonl?|parquet|arrow|txt)(\.gz|\.zst)?")
"""A relative path of a file of rows or of text."""


def functions(script: TrlScript, names: Mapping[str, ast.expr | None]) -> str:
    """Python source of functions or classes of the script, with everything that they depend on.

    Args:
        script: the script.
        names: those that the script has without a value, others with the expression that makes them.
    """
    needed = [(name, len(script.text)) for name, made in names.items() if made is None]
    made = {name: expression for name, expression in names.items() if expression is not None}
    chosen = _closure(script, [*needed, *(name for expression in made.values() for name in _names(script, expression))])
    lines = "".join(f"\n{name} = {_source(script, expression)}\n" for name, expression in made.items())
    return _module(script, "Functions", chosen) + lines


def data(
    script: TrlScript, train: ast.expr, held_out: ast.expr | None
) -> tuple[str, list[tuple[ast.stmt | ast.expr, str]]]:
    """Python source with the functions `train` and `held_out`, which return the rows of the script's datasets, and the
    lines for which these are other rows, each with the reason.

    Args:
        script: the script.
        train: expression of the training data.
        held_out: expression of the held-out data; None to hold out part of the training data.

    Raises:
        UserError: a line depends on a value that the script does not show.
    """
    parts = {"rows": train} if held_out is None else {"train": train, "held_out": held_out}
    loading: dict[str, list[ast.stmt]] = {}
    above: list[ast.stmt] = []
    both = _closure(script, [name for part in parts.values() for name in _names(script, part)])
    earlier = {name: _drawn_earlier(script, part, parts.values()) for name, part in parts.items()}
    for name, part in parts.items():
        chosen = _replayed(script, part, earlier[name], both)
        loading[name] = _loading(script, chosen, part)
        above += [statement for statement in chosen if statement not in loading[name] and statement not in above]
    above.sort(key=lambda statement: statement.lineno)
    for statement in above:
        if taken := OWN & {name for name, _, _ in bound(statement)}:
            raise UserError(script.at(statement, f"data.py has a function {taken.pop()} of its own; rename this one"))
    text = _module(script, "Data", above)
    if held_out is None:
        text = text.replace('"""\n\n', '"""\n\nimport random\n', 1)
    bodies: dict[str, str] = {}
    for name, expression in parts.items():
        lines = [_source(script, one) for one in list[ast.stmt | ast.expr]([*loading[name], *earlier[name]])]
        bodies[name] = _indented("\n".join([*lines, f"return list(map(dict, {_source(script, expression)}))"]))
    templates = templates_of("rloo_pipeline.commands", keep_trailing_newline=True)
    text = templates.get_template("trl_data.py.j2").render(above=text, functions=bodies)
    return text, [*other_rows(script, parts.values(), both)]


def _closure(script: TrlScript, names: Iterable[tuple[str, int]]) -> list[ast.stmt]:
    """The statements that names depend on, in order.

    Args:
        script: the script.
        names: each with the line before which it must be bound.
    """
    waiting, chosen = list(names), dict[int, ast.stmt]()
    while waiting:
        name, before = waiting.pop()
        for binding in script.bindings.get(name, ()):
            statement, line = binding.statement, binding.statement.lineno
            if binding.is_parameter or binding.function or script.is_parsed(binding.part):
                continue  # its values are filled in where they are used
            is_above = binding.value is None or (line < before and line not in script.afterwards)
            if is_above and id(statement) not in chosen:
                chosen[id(statement)] = statement
                waiting += _names(script, statement, binding.value is None and len(script.text))
        if any(script.is_parsed(binding.part) for binding in script.bindings.get(name, ())):
            continue  # neither are the lines that set options
        for statement in script.statements:
            if id(statement) not in chosen and statement.lineno < before and name in _mutated_names(statement):
                chosen[id(statement)] = statement
                waiting += _names(script, statement)
    inner = (part for statement in chosen.values() for part in ast.walk(statement) if isinstance(part, ast.stmt))
    script.taken |= {part.lineno for part in inner}
    return sorted(chosen.values(), key=lambda statement: statement.lineno)


def _drawn_earlier(script: TrlScript, part: ast.expr, parts: Iterable[ast.expr]) -> list[ast.expr]:
    """Expressions of other data that draw random numbers before one that does."""
    drawing = [one for one in (part, *parts) if draws(script, one)]
    own = (part.lineno, part.col_offset)
    return [one for one in drawing if part in drawing and (one.lineno, one.col_offset) < own]


def _replayed(
    script: TrlScript, part: ast.expr, earlier: Sequence[ast.expr], both: Sequence[ast.stmt]
) -> list[ast.stmt]:
    """The statements that data depend on. If they draw random numbers, this includes the lines that seed these, and all
    lines of either data that draw some before, so that both are drawn as in the script.

    Args:
        script: the script.
        part: expression of the data.
        earlier: expressions that draw before this one.
        both: statements that the data depend on, and the other data of the project.
    """
    names = [name for one in (part, *earlier) for name in _names(script, one)]
    chosen = _closure(script, names)
    own = list[ast.stmt | ast.expr]([*chosen, part])
    last = max((one.lineno for one in own if draws(script, one)), default=0)
    before = [one for one in script.statements if one.lineno <= last and one.lineno not in script.afterwards]
    added = [one for one in before if seeds(script, one) or (one in both and draws(script, one))]
    chosen = _closure(script, [*names, *(name for one in added for name in _names(script, one))])
    chosen += [one for one in added if one not in chosen]
    script.taken |= {one.lineno for one in chosen}
    return sorted(chosen, key=lambda statement: statement.lineno)


def _names(script: TrlScript, node: ast.AST, before: int | bool = False) -> list[tuple[str, int]]:
    """Names that a node reads from outside of it, and the line before which they must be bound."""
    line = before or getattr(node, "lineno", 0)
    try:
        return [(name, line) for name in free_names(node)]
    except SyntaxError:
        why = "a copy cannot set a variable of the function around it (nonlocal); move both to the top level"
        raise UserError(script.at(node, why)) from None


def _mutated_names(statement: ast.stmt) -> Iterator[str]:
    """Names whose objects a statement changes: `name.attribute = …`, `name[key] = …`, or `name.append(…)`, also in a
    loop.
    """
    defines = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    for node in () if defines else ast.walk(statement):
        changed = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value.func) == "shuffle":
            yield from (one.id for one in node.value.args[:1] if isinstance(one, ast.Name))  # random.shuffle(rows)
        if isinstance(node, ast.Call) and name_of(node.func) in CHANGING:
            changed = [node.func]
        for place in changed:
            while isinstance(place, ast.Attribute | ast.Subscript):
                place = place.value
                if isinstance(place, ast.Name):
                    yield place.id


def _loading(
    script: TrlScript, statements: Sequence[ast.stmt], part: ast.expr, with_draws: bool = False
) -> list[ast.stmt]:
    """Statements that read rows, that depend on one that does, or that set a name that a function in data.py has.

    Args:
        script: the script.
        statements: the statements that data depend on.
        part: expression of the data.
        with_draws: also those that seed or draw random numbers; implied if others or the expression draw.
    """
    found, names, loaders = list[ast.stmt](), set[str](), {*LOADERS}
    functions = [statement for statement in statements if isinstance(statement, ast.FunctionDef)]
    for _ in functions:  # functions may call each other
        loaders |= {function.name for function in functions if _calls(function, loaders)}
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            continue
        parts = [part for part in ast.walk(statement) if isinstance(part, ast.Name)]
        own = OWN & {name for name, _, _ in bound(statement)} or names & {part.id for part in parts}
        random = with_draws and (seeds(script, statement) or draws(script, statement))
        if own or random or _calls(statement, loaders):
            found.append(statement)
            names |= {part.id for part in parts if isinstance(part.ctx, ast.Store)}
    is_seeded = any(seeds(script, one) or "own" in draws(script, one) for one in (*statements, part))
    if is_seeded and not with_draws and any(draws(script, one) for one in (*found, part)):
        return _loading(script, statements, part, True)
    return found


def _calls(statement: ast.stmt, functions: set[str]) -> bool:
    """True if a statement calls one of these functions."""
    return any(isinstance(part, ast.Call) and name_of(part.func) in functions for part in ast.walk(statement))


def _module(script: TrlScript, kind: str, statements: list[ast.stmt]) -> str:
    """A Python file with these statements."""
    text, before = f'"""{kind} of {script.path.name}, written by `rloo init --from-trl`."""\n', ""
    found = {module: str(folder) for one in statements for module, folder in script.own_modules(one)}
    script.modules |= found
    if found:
        # first, as in a process that runs the script: this file may have the name of one of its modules
        folders = ", ".join(map(repr, dict.fromkeys(found.values())))
        text += f"\nimport sys\n\nsys.path[:0] = [{folders}]  # with the modules of {script.path.name}\n"
    for statement in statements:
        is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        form = "def" if is_definition else "import" if isinstance(statement, ast.Import | ast.ImportFrom) else "line"
        text += (
            ("\n\n" if "def" in (form, before) else "\n" if form != before else "") + _source(script, statement) + "\n"
        )
        before = form
    return text


def _source(script: TrlScript, node: ast.stmt | ast.expr) -> str:
    """The source lines of a node, with the values of command-line options filled in.

    Raises:
        UserError: an option has no value.
    """
    filled = _Filled(script, own_names(node))
    copied = filled.visit(copy.deepcopy(node))
    if filled.has_changed or isinstance(node, ast.expr):
        return ast.unparse(copied)
    first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
    inside = _inside_texts(node)
    lines = enumerate(script.text.split("\n")[first - 1 : node.end_lineno], first)
    # a line that begins inside a text keeps its indentation, which belongs to the text
    outer = re.compile(rf"[ \t]{{0,{node.col_offset}}}")
    return "\n".join(line if number in inside else outer.sub("", line, count=1) for number, line in lines)


def _inside_texts(node: ast.AST) -> set[int]:
    """The lines that begin inside a text."""
    texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
    return {line for part in texts for line in range(part.lineno + 1, (part.end_lineno or 0) + 1)}


def _indented(body: str) -> str:
    """The body of a function, without spaces inside its texts."""
    inside = _inside_texts(ast.parse(body))
    lines = enumerate(body.split("\n"), 1)
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in lines)


def texts(text: str) -> set[str]:
    """The parameters of functions and the strings in a Python file."""
    nodes = [*ast.walk(ast.parse(text))]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings | {node.arg for node in nodes if isinstance(node, ast.arg)}


def undefined(text: str) -> set[str]:
    """Names that a Python file reads and does not define."""
    top, *inner = scopes(text)
    known = [symbol for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    known += [one for table in inner for one in table.get_symbols() if one.is_global() and one.is_assigned()]
    return free_names(text) - {symbol.get_name() for symbol in known} - {*dir(builtins), "__file__"}


def missing_files(text: str) -> set[str]:
    """The data files that a Python file names by a relative path and that do not exist. Parts of paths do not count,
    nor arguments of the file's own functions, which may add a folder, nor files to write.
    """
    tree, found = ast.parse(text), set[str]()
    joining = {"join", "joinpath", *(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        is_part = isinstance(node, ast.BinOp | ast.JoinedStr)
        if is_part or (isinstance(node, ast.Call) and name_of(node.func) in joining):
            continue
        if isinstance(node, ast.Call) and _takes_other_paths(node):
            waiting.append(node.func)
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DATA_FILE.fullmatch(node.value):
            found.add(node.value)
        waiting += ast.iter_child_nodes(node)
    return found


def _takes_other_paths(call: ast.Call) -> bool:
    """True if a call writes a file, or its paths count from a folder that another argument names."""
    name, keywords = name_of(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    match name, call.args:
        case "open", [_, ast.Constant(str(mode)), *_]:
            return mode[:1] in "wax"
        case "open", _:
            given = keywords.get("mode")
            return isinstance(given, ast.Constant) and str(given.value)[:1] in "wax"
        case "Path", [_, _, *_]:
            return True
        case "load_dataset", [ast.Constant(str(path)), *_]:
            return "data_dir" in keywords or (path not in FORMATS and Path(path).is_dir())
    return name.startswith("to_")


class _Filled(ast.NodeTransformer):
    """Fills in the values of options and of parameters of the function that makes the trainer. Also makes file paths
    absolute, since the project is not in the script's folder.

    Args:
        script: the script.
        own: arguments and variables of functions that are copied, whose names do not stand for options.
    """

    def __init__(self, script: TrlScript, own: set[str]) -> None:
        self.script, self.own = script, own
        self.has_changed = False

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replaces `arguments.dataset` by its value."""
        is_own = isinstance(node.value, ast.Name) and node.value.id in self.own
        return self.generic_visit(node) if is_own or not self.script.is_parsed(node.value) else self._written(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Leaves out `arguments.dataset_name` before `or` if neither the script nor its options name it: TRL's default
        is None.
        """
        first = node.values[0]
        if (
            isinstance(node.op, ast.Or)
            and isinstance(first, ast.Attribute)
            and first.attr == "dataset_name"
            and not (isinstance(first.value, ast.Name) and first.value.id in self.own)
            and self.script.is_parsed(first.value)
            and self.script.holds(first) is None
            and not re.search(r"\bdataset[_-]name\b(?=\s*:|['\"])", self.script.text)  # a field, or an argument
        ):
            self.has_changed = True
            del node.values[0]
        kept: ast.AST = self.generic_visit(node) if len(node.values) > 1 else self.visit(node.values[0])
        return kept

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replaces a parameter by its value, and `__file__` by the script's path."""
        if node.id == "__file__":
            self.has_changed = True
            return ast.Constant(str(self.script.path.resolve()))
        found = self.script.binding(node.id, node.lineno)
        if node.id in self.own or not isinstance(node.ctx, ast.Load) or found is None:
            return node
        return self._written(node) if found.is_parameter or self.script.is_parsed(node) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Seeds a random choice of rows that has no seed, since `train` and `held_out` both make it, and each rerun.
        Makes the path of a folder of rows absolute, even if it is a name without a slash.
        """
        match node:
            case ast.Call(args=[ast.Constant(str(name)), *_]) if name_of(node.func) in (
                "load_dataset",
                "load_from_disk",
            ):
                if name not in FORMATS and Path(name).is_dir():
                    self.has_changed = True
                    node.args[0] = ast.Constant(str(Path(name).resolve()))
        if has_no_seed(node):
            node.keywords = [one for one in node.keywords if one.arg != "seed"]
            node.keywords.append(ast.keyword("seed", ast.Constant(0)))
            self.has_changed = True
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Visits only the first part of an f-string, since only that can begin a path."""
        node.values = [self.visit(part) for part in node.values[:1]] + [
            part if isinstance(part, ast.Constant) else self.visit(part) for part in node.values[1:]
        ]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replaces the path of a file, relative to where the script runs, by its absolute path."""
        text = node.value
        if (
            not isinstance(text, str)
            or not re.fullmatch(r"[^/\n][^\n]{0,250}", text)
            or not re.search(r"[^./].*[./]", text)
        ):
            return node
        path = Path(text)
        if not (path.is_file() or ("/" in text and path.is_dir())):
            return node
        self.has_changed = True
        return ast.Constant(str(path.resolve()) + "/" * text.endswith("/"))

    def _written(self, node: ast.Attribute | ast.Name) -> ast.AST:
        try:
            value = self.script.value(node)
        except UnknownValueError:
            problem = f"{self.script.hidden(node)}; write it into the line"
            if isinstance(node, ast.Attribute):
                problem = f"give the option {node.attr}: --from-trl '{self.script.path} --{node.attr} VALUE'"
            elif self.script.is_parsed(node):
                problem = f"{node.id} has all options of the command line; pass the values that the call needs instead"
            raise UserError(self.script.at(node, problem)) from None
        self.has_changed = True
        filled: ast.AST = self.visit(ast.parse(repr(value), mode="eval").body)
        return filled
