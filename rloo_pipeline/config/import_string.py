"""Functions named in a configuration: `module:function` or `path/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from rloo_pipeline.errors import UserError, did_you_mean


def source_of(reference: str) -> Path | None:
    """The file that a reference points into, without importing it; None for what has no file of its own.

    Raises:
        UserError: the reference is malformed or points to nothing.
    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"'{reference}': write `module:function` or `path/file.py:function`")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise UserError(f"'{reference}': no file {path} (looked for from {Path.cwd()})")
        return path
    try:
        spec = importlib.util.find_spec(where)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        raise UserError(f"'{reference}': no module {where}; install it, or name a file as path/file.py:{name}")
    return Path(spec.origin) if spec.has_location and spec.origin else None


def check(reference: str) -> Path | None:
    """The file that a reference points into, once a look at its text shows the function; nothing is imported.

    Raises:
        UserError: the reference is malformed, or the file or the function is not there.
    """
    path = source_of(reference)
    where, _, name = reference.rpartition(":")
    if path is not None and path.suffix == ".py":
        try:
            names = _defined(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not valid Python ({error})") from error
        if name not in names:
            raise UserError(f"'{reference}': {where} has no function {name}{did_you_mean(name, names)}")
    return path


@lru_cache(32)
def _defined(text: str) -> frozenset[str]:
    """Names that a file's text binds at its top level: functions, classes, imports, assignments."""
    import ast

    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            names |= {target.id for target in ast.walk(node) if isinstance(target, ast.Name)}
    return frozenset(names)


def load(reference: str) -> Callable[..., Any]:
    """The function itself.

    Raises:
        UserError: the reference points to nothing, or the import failed.
    """
    path = source_of(reference)
    where, _, name = reference.rpartition(":")
    try:
        module = _from_file(path) if where.endswith(".py") and path else importlib.import_module(where)
    except Exception as error:
        line = place(error, reference)
        raise UserError(
            f"'{reference}': importing {where} failed with {type(error).__name__}: {error}{line}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"'{reference}': {where} has no function {name}{did_you_mean(name, vars(module))}")
    found: Callable[..., Any] = function
    return found


def place(error: BaseException, reference: str) -> str:
    """Where in a user's files an exception was raised: ` (mine.py, line 12)`, the innermost line of the function's own
    file or of one below its folder. Empty where none of them had a part in it.

    Args:
        error: raised by a function or its import.
        reference: to the function.
    """
    import traceback

    source = source_of(reference)
    if source is None or isinstance(error, SyntaxError):  # that names the line itself
        return ""
    own, folder, package = source.resolve(), source.resolve().parent, Path(__file__).resolve().parent
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename).resolve()
        beside = file.is_relative_to(folder) and not file.is_relative_to(package)
        if file == own or (beside and not {"site-packages", "dist-packages"} & set(file.parts)):
            found = f" ({file.relative_to(folder)}, line {frame.lineno})"
    return found


def _from_file(path: Path) -> Any:
    """A module from a file, under a name of its own so that two files of one name do not collide. It can import what
    lies beside it, as a script can; what is installed comes first.
    """
    import hashlib  # here, as ast above: every worker that scores imports this module and needs neither

    name = f"rloo_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
