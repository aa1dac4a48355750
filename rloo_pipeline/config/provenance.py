"""Digests of the code that makes a stage's result, so that an edit reruns the stages it touches and no others.

The digest of a stage covers its own file, every module of this package that it imports, directly or through others,
and the files of functions that the configuration names, with what they import from beside them. Modules that cannot
change a result are left out, and so are imports for type checkers.

Of a Python file it takes the syntax tree, in a form that is the same in Python 3.11 to 3.13: comments, docstrings and
layout change nothing.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from rloo_pipeline.config import STAGES, Config, estimator, import_string

PACKAGE = Path(__file__).parent.parent
WITHOUT_EFFECT = {
    *("config", "errors", "runtime", "workers", "preflight", "artifacts.files", "artifacts.fence"),
    *("trackers.events", "rollout.swap_check", "training.formats", "training.lora_support"),
    *("training.model_support", "training.model_types", "training.self_check"),
}
"""Modules and packages whose code says where, when and how a result is written or told, and never what it is."""
READS_TEXT = {"__doc__", "getdoc", "getsource", "getcomments", "getsourcelines"}
"""Names by which code reads docstrings or comments; where a user's code has one, they count."""


def source_digest(stage: str, config: Config) -> str:
    """Short digest of all code behind `stage` under this configuration.

    Raises:
        UserError: the configuration names a function that is not there.
    """
    decides = STAGES[stage].decides
    named = [import_string.check(reference) for reference in functions(config, decides)]
    own = PACKAGE / "stages" / f"{stage.replace('-', '_')}.py"
    closures = [_closure(start.resolve()) for start in (own, *named) if start is not None]
    files = {(_name(file), _digest(file, as_written)) for closure in closures for file, as_written in _read(closure)}
    digest = hashlib.sha256()
    for name, of_file in sorted(files):
        digest.update(f"{name} {of_file}\n".encode())
    return digest.hexdigest()[:16]


def functions(config: Config, sections: Iterable[str]) -> Iterator[str]:
    """References to functions in these sections, as the configuration has them."""
    if "rewards" in sections:
        yield from (reward.function for reward in config.rewards)
    if "dataset" in sections:
        yield from (source.generator for source in (config.dataset.train, config.dataset.eval) if source.generator)
    if "warmstart" in sections and config.warmstart.sft and config.warmstart.sft.demonstrations.generator:
        yield config.warmstart.sft.demonstrations.generator
    if "algorithm" in sections:
        yield estimator(config.algorithm.advantage)
    if "model" in sections and config.model.build:
        yield config.model.build


def _name(file: Path) -> str:
    """A name that does not depend on where the package is installed."""
    return str(file.relative_to(PACKAGE)) if file.is_relative_to(PACKAGE) else file.name


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _read(closure: frozenset[Path]) -> Iterator[tuple[Path, bool]]:
    """Files, and whether each counts as it is written: those of users of which one may read docstrings or source."""
    theirs = {file for file in closure if not file.is_relative_to(PACKAGE)}
    names = {
        getattr(node, "attr", getattr(node, "id", None))
        for file in theirs
        if file.suffix == ".py"
        for node in ast.walk(_tree(file))
    }
    for file in closure:
        yield file, file.suffix != ".py" or (file in theirs and not names.isdisjoint(READS_TEXT))


@cache
def _digest(file: Path, as_written: bool) -> str:
    text = file.read_bytes() if as_written else normal_form(_tree(file)).encode()
    return hashlib.sha256(text).hexdigest()


def normal_form(tree: ast.AST) -> str:
    """A syntax tree as text, without positions, empty fields and strings that stand by themselves (docstrings)."""
    made: list[str] = []

    def add(node: object, within: object) -> None:
        if isinstance(node, ast.AST):
            made.append(f"{type(node).__name__}(")
            for name, value in ast.iter_fields(node):
                if value is not None and value != [] and name != "kind":
                    made.append(f"{name}=")
                    add(value, node)
            made.append(")")
        elif isinstance(node, list):
            for inner in node:
                if not _is_idle(inner, within):
                    add(inner, node)
                    made.append(",")
        else:
            made.append(repr(node))

    add(tree, None)
    return "".join(made)


def _is_idle(node: object, within: object) -> bool:
    """Whether a node is a string that stands by itself, or an empty part of an f-string, which some Pythons have."""
    if isinstance(within, ast.JoinedStr):
        return isinstance(node, ast.Constant) and node.value == ""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def _closure(start: Path) -> frozenset[Path]:
    """A file and the modules of this package, or beside it, that it imports, through any number of steps, with their
    templates.
    """
    found, waiting = {start}, [start]
    while waiting:
        for file in _imports(waiting.pop()) - found:
            found.add(file)
            waiting.append(file)
    templates = (template for file in found for template in file.parent.glob(f"{file.stem}.*.j2"))
    return frozenset({*found, *templates})


@cache
def _imports(file: Path) -> frozenset[Path]:
    """The modules of this package, and for a file outside of it those in its folder, that a file imports anywhere in
    it.
    """
    names: set[str] = set()
    for node in _executed(_tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    split = [name.split(".") for name in names]
    own = [parts[1:] for parts in split if parts[0] == PACKAGE.name and parts[1:]]
    files = {_file_of(PACKAGE, parts) for parts in own if not WITHOUT_EFFECT & {parts[0], ".".join(parts[:2])}}
    if not file.is_relative_to(PACKAGE):
        others = [parts for parts in split if parts[0] != PACKAGE.name]
        files |= {_file_of(file.parent, parts[:length]) for parts in others for length in range(1, len(parts) + 1)}
    return frozenset(found for found in files if found is not None)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from _executed(other)
        else:
            yield child
            yield from _executed(child)


def _file_of(folder: Path, parts: list[str]) -> Path | None:
    """The file of a module given by its name's parts below a folder; None where the name is of something inside a
    module, or of none that lies there.
    """
    path = folder.joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)
