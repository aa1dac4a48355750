"""Copies the parts of a TRL script that a project keeps: functions, and the lines that make the dataset.

A copy has the statements that the part depends on, in the order of the script, and nothing that trains.
"""

import ast
import builtins
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rloo_pipeline.commands.trl_script import TrlScript
from rloo_pipeline.commands.trl_syntax import all_nodes, bound, free_names, name_of, own_names, scopes
from rloo_pipeline.commands.trl_tables import UNSLOTH
from rloo_pipeline.commands.trl_values import UnknownValueError
from rloo_pipeline.errors import UserError
from rloo_pipeline.report.frame import templates_of

LOADERS = ("load_dataset", "load_from_disk", "from_list", "from_dict", "from_generator", "from_pandas", "from_json")
"""Functions of `datasets` that read rows. Statements that depend on them stay inside a function."""
FORMATS = ("csv", "json", "parquet", "text", "arrow", "pandas", "xml", "webdataset", "imagefolder", "audiofolder")
"""First arguments of `load_dataset` that name a format, even beside a folder of this name."""
SEEDING = ("seed", "manual_seed", "set_seed", "seed_everything")
"""Functions that seed Python's, NumPy's or torch's random numbers."""
RANDOM = {
    "random": "__import__('random').seed(0)",
    **dict.fromkeys(("numpy", "pandas", "sklearn"), "__import__('numpy').random.seed(0)"),
    "torch": "__import__('torch').manual_seed(0)",
}
"""Libraries that draw random numbers, and how to seed them, whatever names a script gives them."""
GENERATORS = ("Random", "RandomState", "default_rng")
"""Generators of random numbers, which draw anew each time unless they get a seed."""
CHANGING = ("append", "extend", "insert", "add", "update", "sort", "reverse")
"""Methods that change a list, a set or a dict."""
OWN = {"train", "held_out", "rows", "_split", "_both"}
"""Names of the functions in data.py. Variables inside them may have these names too."""
DATA_FILE = re.compile(r"(?!/|~|\w+:)[^\s]*\w\.(csv|tsv|jsonl?|parquet|arrow|txt)(\.gz|\.zst)?")
"""A relative path of a file of rows or of text."""

Note = tuple[ast.stmt | ast.expr, str, str]
"""A line, what has it in the project if anything has, and a remark."""


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


def data(script: TrlScript, train: ast.expr, held_out: ast.expr | None) -> tuple[str, list[Note]]:
    """Python source with the functions `train` and `held_out`, which return the rows of the script's datasets, and
    notes on the lines that decide what is drawn at random.

    If random numbers may decide the rows, both functions take all steps of the script in its order, with its seeds.

    Args:
        script: the script.
        train: expression of the training data.
        held_out: expression of the held-out data; None to hold out part of the training data.

    Raises:
        UserError: a line depends on a value that the script does not show.
    """
    parts = {"rows": train} if held_out is None else {"train": train, "held_out": held_out}
    chosen = {name: _closure(script, _names(script, part)) for name, part in parts.items()}
    together = [one for statements in chosen.values() for one in statements]
    calls = _calls_of(*together, *parts.values())
    differs = "data.py draws with seed=0, not with the script's seed"
    notes: list[Note] = [(call, "", differs) for call in _unseeded(script, calls)]
    anew = "train and held_out draw anew in each call, also in a rerun; give it a seed in data.py"
    notes += [(call, "", anew) for call in calls if _is_unseeded_generator(call)]
    if libraries := {library for one in together for library in _libraries(one)} & RANDOM.keys():
        above, bodies, seeds = _as_one(script, parts, sorted(libraries))
        notes += [(seed, "data.py", "if nothing else draws random numbers before the data") for seed in seeds]
    else:
        loading = {name: _loading(statements) for name, statements in chosen.items()}
        above = [one for name in parts for one in chosen[name] if one not in loading[name]]
        bodies = {
            name: [*(_source(script, one) for one in loading[name]), f"return {_rows(script, part)}"]
            for name, part in parts.items()
        }
    above = sorted({id(one): one for one in above}.values(), key=lambda statement: statement.lineno)
    for statement in above:
        if taken := OWN & {name for name, _, _ in bound(statement)}:
            raise UserError(script.at(statement, f"data.py has a function {taken.pop()} of its own; rename this one"))
    text = _module(script, "Data", above, together)
    if held_out is None:
        text = text.replace('"""\n\n', '"""\n\nimport random\n', 1)
    made = {name: _indented("\n".join(lines)) for name, lines in bodies.items()}
    templates = templates_of("rloo_pipeline.commands", keep_trailing_newline=True)
    return templates.get_template("trl_data.py.j2").render(above=text, functions=made), notes


def _as_one(
    script: TrlScript, parts: Mapping[str, ast.expr], libraries: Iterable[str]
) -> tuple[list[ast.stmt], dict[str, list[str]], list[ast.stmt]]:
    """The imports of a data.py whose functions take all steps that make the data, these functions, and the lines of the
    script that seed random numbers.
    """
    last = max(part.lineno for part in parts.values())
    before = [one for one in script.statements if one.lineno < last and one.lineno not in script.afterwards]
    seeds = [one for one in before if _seeds(script, one)]
    names = [name for one in (*seeds, *parts.values()) for name in _names(script, one)]
    steps = sorted({*_closure(script, names), *seeds}, key=lambda statement: statement.lineno)
    script.taken |= {seed.lineno for seed in seeds}
    above: list[ast.stmt] = [one for one in steps if isinstance(one, ast.Import | ast.ImportFrom)]
    lines = [] if seeds else [*dict.fromkeys(f"{RANDOM[one]}  # the script shows no seed" for one in libraries)]
    lines += [_source(script, one) for one in steps if one not in above]
    if len(parts) == 1:
        return above, {"rows": [*lines, f"return {_rows(script, parts['rows'])}"]}, seeds
    for name in sorted(parts, key=lambda name: (parts[name].lineno, parts[name].col_offset)):
        lines.append(f"{name}_rows = {_rows(script, parts[name])}")
    lines.append("return train_rows, held_out_rows")
    return above, {"train": ["return _both()[0]"], "held_out": ["return _both()[1]"], "_both": lines}, seeds


def _rows(script: TrlScript, part: ast.expr) -> str:
    return f"list(map(dict, {_source(script, part)}))"


def _libraries(statement: ast.stmt) -> set[str]:
    """The libraries that a statement imports."""
    modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
    modules += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
    return {module.partition(".")[0] for module in modules}


def _seeds(script: TrlScript, statement: ast.stmt) -> bool:
    """True for a line that seeds random numbers with values that the script shows."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or name_of(call.func) not in SEEDING:
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return bool(given) and all(script.holds(value) is not None for value in given)


def _calls_of(*nodes: ast.AST) -> list[ast.Call]:
    """All calls in these nodes, each once."""
    return list({id(call): call for node in nodes for call in all_nodes(node, ast.Call)}.values())


def _unseeded(script: TrlScript, calls: list[ast.Call]) -> list[ast.Call]:
    """The calls that draw rows without a seed, if one of them, or a line of the script, seeds random numbers."""
    lines = [one.value for one in script.statements if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    is_seeded = any(name_of(call.func) in SEEDING for call in (*lines, *calls))
    return [call for call in calls if _has_no_seed(call)] if is_seeded else []


def _has_no_seed(call: ast.Call) -> bool:
    """True if a call shuffles or splits a dataset at random without a seed."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    values = {one.arg: one.value.value if isinstance(one.value, ast.Constant) else ... for one in call.keywords}
    is_random = method == "train_test_split" or (method == "shuffle" and not call.args)
    given = {name for name, value in values.items() if value is not None or name is None}
    return is_random and values.get("shuffle") is not False and not given & {"seed", "generator", "random_state", None}


def _is_unseeded_generator(call: ast.Call) -> bool:
    """True if a call makes a generator of random numbers without a seed."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    are_none = (isinstance(one, ast.Constant) and one.value is None for one in given)
    return name_of(call.func) in GENERATORS and all(are_none)


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
                copied = _tokenizer_alone(statement) or statement
                waiting += _names(script, copied, binding.value is None and len(script.text))
        if any(script.is_parsed(binding.part) for binding in script.bindings.get(name, ())):
            continue  # neither are the lines that set options
        for statement in script.statements:
            if id(statement) not in chosen and statement.lineno < before and name in _mutated_names(statement):
                chosen[id(statement)] = statement
                waiting += _names(script, statement)
    inner = (part for statement in chosen.values() for part in ast.walk(statement) if isinstance(part, ast.stmt))
    script.taken |= {part.lineno for part in inner}
    return sorted(chosen.values(), key=lambda statement: statement.lineno)


def _tokenizer_alone(statement: ast.AST) -> ast.Assign | None:
    """A line that loads the tokenizer, in place of one in which Unsloth loads it with the model, which would take a GPU
    in each stage; None for other lines.
    """
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[_, tokenizer])],
            value=ast.Call(func=ast.Attribute(ast.Name(kind), "from_pretrained")) as call,
        ) if kind in UNSLOTH:
            names = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "model_name")]
            loader = "AutoProcessor" if kind == "FastVisionModel" else "AutoTokenizer"
            loads = ast.parse(f"__import__('transformers').{loader}.from_pretrained", mode="eval").body
            alone = ast.Assign([tokenizer], ast.Call(loads, names[:1], []))
            return ast.fix_missing_locations(ast.copy_location(alone, statement))
    return None


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


def _loading(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Assignments that read rows, that depend on one that does, or whose name is that of a function in data.py."""
    found, names, loaders = list[ast.stmt](), set[str](), {*LOADERS}
    functions = [statement for statement in statements if isinstance(statement, ast.FunctionDef)]
    for _ in functions:  # functions may call each other
        loaders |= {function.name for function in functions if _calls(function, loaders)}
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            continue
        parts = list(ast.walk(statement))
        own = OWN & {name for name, _, _ in bound(statement)}
        if own or _calls(statement, loaders) or names & {part.id for part in parts if isinstance(part, ast.Name)}:
            found.append(statement)
            names |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return found


def _calls(statement: ast.stmt, functions: set[str]) -> bool:
    """True if a statement calls one of these functions."""
    return any(isinstance(part, ast.Call) and name_of(part.func) in functions for part in ast.walk(statement))


def _module(script: TrlScript, kind: str, statements: Iterable[ast.stmt], others: Iterable[ast.stmt] = ()) -> str:
    """A Python file with these statements; others that it will have, too, may import modules of the script's folder."""
    text, before = f'"""{kind} of {script.path.name}, written by `rloo init --from-trl`."""\n', ""
    found = {module: str(folder) for one in (*statements, *others) for module, folder in script.own_modules(one)}
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

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Loads a tokenizer without its model."""
        alone = _tokenizer_alone(node)
        self.has_changed |= alone is not None
        return self.generic_visit(alone or node)

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
        if _has_no_seed(node):
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
