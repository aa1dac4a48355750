"""The imports of a Python file, a digest of its code, and whether it may read docstrings or source.

Parsing this package takes most of Snakemake's start-up time, so the facts of a file are cached for the user under the
SHA-256 of its content.
"""

import ast
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.runtime.caches import cache_folder

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of syntax tree nodes that hold nested statements."""
READS_TEXT = {"__doc__", "getdoc", "getsource", "getcomments", "getsourcelines"}
"""Names through which code can read docstrings or comments."""
MOST = 2000
"""Maximum number of files in the cache: enough for several versions of this package."""


class Facts(NamedTuple):
    """The cached facts of one file."""

    digest: str
    """SHA-256 (hex) of `normal_form`."""
    imports: list[tuple[int, str, list[str]]]
    """The level of each relative import (0 for others), its module (empty for `import a, b`), and the names."""
    reads_text: bool
    """True if the code uses one of READS_TEXT."""


_new: dict[str, Facts] = {}


@cache
def facts(file: Path) -> Facts:
    """Returns the facts of a file, from the cache if possible.

    Raises:
        SyntaxError: it is not Python.
    """
    content = file.read_bytes()
    key = hashlib.sha256(content).hexdigest()
    if key in _kept():
        return _kept()[key]
    tree = ast.parse(content)
    digest = hashlib.sha256(normal_form(tree).encode()).hexdigest()
    return _new.setdefault(key, Facts(digest, list(_imports(tree)), _reads_text(tree, content)))


def keep() -> None:
    """Writes new facts to the user's cache, if it is writable."""
    if not _new:
        return
    text = json.dumps(dict([*{**_kept(), **_new}.items()][-MOST:]))
    temporary = _file().with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        temporary.replace(_file())
    _kept().update(_new)
    _new.clear()


@cache
def _file() -> Path:
    """Path of the cache for this version of this module."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return cache_folder() / "rloo_pipeline" / f"syntax-{version}.json"


@cache
def _kept() -> dict[str, Facts]:
    """Loads the user's cache; empty if it is missing or damaged."""
    try:
        digest, _, text = _file().read_text().partition("\n")
    except (OSError, ValueError):
        return {}
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return {}
    return {key: Facts(*values) for key, values in json.loads(text).items()}


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    for node in _executed(tree.body):
        if isinstance(node, ast.Import):
            yield 0, "", [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", [alias.name for alias in node.names]


def _reads_text(tree: ast.Module, content: bytes) -> bool:
    if not any(name.encode() in content for name in READS_TEXT):  # much faster than the tree
        return False
    names = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(tree)}
    return not names.isdisjoint(READS_TEXT)


def _executed(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These statements and all nested ones, except those under `if TYPE_CHECKING:`."""
    for node in statements:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _executed(node.orelse)
            continue
        yield node
        for name in BLOCKS:
            yield from _executed(getattr(node, name, ()))


def normal_form(node: object) -> str:
    """A syntax tree as text, without positions, empty fields and string statements (docstrings)."""
    if not isinstance(node, ast.AST):
        return repr(node)
    text = f"{type(node).__name__}("
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name == "kind":
            continue
        if isinstance(value, list):
            inner = "".join(f"{normal_form(one)}," for one in value if not _has_no_effect(one, node))
        else:
            inner = normal_form(value)
        text += f"{name}={inner}"
    return f"{text})"


def _has_no_effect(node: object, parent: object) -> bool:
    """True if a node is a string statement, or an empty part of an f-string, which only some Python versions keep."""
    if isinstance(parent, ast.JoinedStr):
        return isinstance(node, ast.Constant) and node.value == ""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
