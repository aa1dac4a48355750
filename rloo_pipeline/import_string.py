"""Imports functions that a configuration names as `module:function` or `path/file.py:function`.

In a run's jobs, their code is the run's frozen copy (`frozen_functions`). For an environment of another library,
`LIBRARY:ARGUMENT` calls that library's function in `LIBRARIES` with the argument.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from rloo_pipeline import frozen_functions
from rloo_pipeline.errors import UserError, did_you_mean, unexpanded

LIBRARIES = {
    "openenv": "rloo_pipeline.environments.openenv_server:environment",
    "verifiers": "rloo_pipeline.environments.verifiers_tasks:environment",
}
"""Functions of this package that take the rest of a reference and return an environment class."""
UNLISTED = {"*", "__getattr__", "sys.modules[__name__]"}
"""Names at the top level of a file which mean that it may define names its text does not show."""


def of_library(reference: str) -> tuple[str, str | None]:
    """Splits a reference into its import string and, for an environment of another library, the argument."""
    library, _, argument = reference.partition(":")
    return (LIBRARIES[library], argument.strip()) if library in LIBRARIES and argument else (reference, None)


def source_of(reference: str) -> Path | None:
    """The file of the module in a reference, without importing it; None if the module has no file.

    Raises:
        UserError: the reference is malformed, or there is no such file or module.
    """
    frozen_functions.in_use()
    module, colon, name = of_library(reference)[0].rpartition(":")
    if not colon or not module or not name:
        raise UserError(f"'{reference}': write `module:function` or `path/file.py:function`")
    if module.endswith(".py"):
        path = Path(module)
        if not frozen_functions.exists(path):
            suggestion = did_you_mean(path.name, (file.name for file in path.parent.glob("*.py"))) + unexpanded(module)
            if copies := sorted(Path("results").glob(f"*/{frozen_functions.FOLDER}/{path.name}")):
                suggestion = f"; a run has a copy to put there: {copies[-1]}"
            raise UserError(f"'{reference}': no file {path} (looked for from {Path.cwd()}){suggestion}")
        return path
    try:
        spec = importlib.util.find_spec(module)  # imports the packages that the module is in
    except ValueError:  # a module without a spec
        spec = None
    except (Exception, SystemExit) as error:
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            raise _failed_import(reference, module, error) from error
        spec = None
    if spec is None:
        advice = f"; install it, or name a file as path/file.py:{name}"
        if module.startswith(f"{__package__}."):
            advice = " in this version; docs/rewards.md and docs/environments.md name those that it has"
        raise UserError(f"'{reference}': no module {module}{advice}")
    return Path(spec.origin) if spec.has_location and spec.origin else None


def check(reference: str) -> Path | None:
    """Checks by the text of its file that a reference names a function, without importing anything. Returns the file.

    Raises:
        UserError: the reference is malformed, or there is no such file, module or function.
    """
    path = source_of(reference)
    module, _, name = of_library(reference)[0].rpartition(":")
    if path is not None and path.suffix == ".py":
        try:
            names = _top_level_names(frozen_functions.source(path).read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not valid Python ({error})") from error
        if name not in names and not names & UNLISTED:
            raise UserError(f"'{reference}': {module} has no function {name}{did_you_mean(name, names)}")
    return path


@lru_cache(32)
def _top_level_names(text: str) -> frozenset[str]:
    """Functions, classes, imports and variables at the top level of a Python file, including those inside `if`, `try`
    and `with`.
    """
    import ast

    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Subscript) and ast.unparse(node) in UNLISTED:
            names.add(ast.unparse(node))
        else:
            nodes += ast.iter_child_nodes(node)
    return frozenset(names)


def load(reference: str, imported: dict[Path, Any] | None = None) -> Callable[..., Any]:
    """Imports a function. For an environment of another library, creates its class.

    Args:
        reference: the import string.
        imported: the modules of files that earlier calls imported, so that functions of one file share its variables.

    Raises:
        UserError: the file, module or function does not exist, its import fails, or the run lacks a copy of what it
            imports.
    """
    path, (function_name, argument) = source_of(reference), of_library(reference)
    module_name, _, name = function_name.rpartition(":")
    before = {*sys.modules}
    try:
        if path and module_name.endswith(".py"):
            modules = {} if imported is None else imported
            module = modules[path] = modules.get(path) or _import_file(path)
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that reads its command line or ends itself
        raise _failed_import(reference, module_name, error, error_location(error, reference)) from error
    if path is not None:
        frozen_functions.require_copies(path, {key: sys.modules[key] for key in sys.modules.keys() - before})
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"'{reference}': {module_name} has no function {name}{did_you_mean(name, vars(module))}")
    return function if argument is None else function(argument)


def _failed_import(reference: str, module: str, error: BaseException, where: str = "") -> UserError:
    return UserError(f"'{reference}': importing {module} failed with {type(error).__name__}: {error}{where}")


def error_location(error: BaseException, reference: str) -> str:
    """The position in a user's files where an exception was raised, such as ` (mine.py, line 12)`: the innermost frame
    in the function's own file or in one below its folder. Empty if there is none, or if the file is no longer found.

    Args:
        error: exception that the function or its import raised.
        reference: reference to the function.
    """
    import traceback

    try:
        source = source_of(reference)
    except UserError:  # the function has changed the working folder
        return ""
    names_itself = isinstance(error, SyntaxError) and not (error.filename or "<").startswith("<")
    if source is None or names_itself:
        return ""
    own, folder, package = source.resolve(), source.resolve().parent, Path(__file__).resolve().parent
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<"):  # code without a file, as of `eval`
            continue
        file = Path(frame.filename).resolve()
        below_folder = file.is_relative_to(folder) and not file.is_relative_to(package)
        if file == own or (below_folder and not {"site-packages", "dist-packages"} & set(file.parts)):
            location = f" ({file.relative_to(folder)}, line {frame.lineno})"
    return location


def _import_file(path: Path) -> Any:
    """Imports a file under a unique module name, so that files of the same name do not collide.

    Like a script, the file can import its neighbours, but installed packages take precedence.
    """
    import hashlib  # every scoring worker imports this module, and most need neither hashlib nor ast

    name = f"rloo_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = frozen_functions.spec_of(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module
