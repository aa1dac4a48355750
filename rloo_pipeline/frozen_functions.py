"""Freezes the user's functions for a run: processes import copies in place of the user's files.

Copies are in the folder `functions` of a run or experiment; `functions.json` in it maps each copy to its file. A copy
replaces a file's text but not its path: `__file__`, tracebacks and relative imports are those of the original, so a
function still finds data next to its file. `use` turns the copies on for this process and its children.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_pipeline.errors import UserError, naming

FOLDER = "functions"
INDEX = "functions.json"
VARIABLE = "RLOO_FUNCTIONS"
"""Environment variable with the folder of the copies in use; empty if there are none. Children inherit it."""


class Copies(MetaPathFinder):
    """The copies in use. As an import finder, it finds modules in copies even if the original files are gone."""

    def __init__(self, folder: str) -> None:
        """Takes the folder with the copies; empty if there are none."""
        self.folder = folder
        self.by_file = {file: Path(folder, copy) for file, copy in _read(Path(folder)).items()} if folder else {}
        self._names = {file.parent.name if file.stem == "__init__" else file.stem for file in self.by_file}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in a copy, if Python's own search would find the copied file first."""
        name = fullname.rpartition(".")[2]
        if name not in self._names:
            return None
        for entry in sys.path if path is None else path:
            package = Path(entry).resolve() / name
            for file in (package / "__init__.py", package.with_suffix(".py")):
                if file in self.by_file:
                    return spec_of(fullname, file)
            if PathFinder.find_spec(fullname, [entry]):
                return None
        # `pip install -e` may find a module by a finder of its own
        found = (finder.find_spec(fullname, path, _target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        origin = Path(spec.origin).resolve() if spec and spec.origin else Path()
        return spec_of(fullname, origin) if origin in self.by_file else None


class CopyLoader(SourceFileLoader):
    """Loads a module from the copy of its file, never from bytecode, which belongs to the original file."""

    def get_data(self, path: str) -> bytes:  # noqa: D102 - documented in the base class
        return source(Path(path)).read_bytes()

    def path_stats(self, path: str) -> Mapping[str, float]:  # noqa: D102 - documented in the base class
        raise OSError(f"{path}: bytecode is not looked for")

    def exec_module(self, module: ModuleType) -> None:  # noqa: D102 - documented in the base class
        import linecache

        text = decode_source(self.get_data(self.path))  # `get_source` would not say why a file cannot be read
        # without a modification time, tracebacks and `inspect` keep these lines
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
        super().exec_module(module)


_copies = Copies("")


def in_use() -> Copies:
    """The copies that this process uses: `use` named them, here or in a parent process."""
    global _copies
    folder = os.environ.get(VARIABLE, "")
    if _copies.folder != folder:
        if _copies in sys.meta_path:
            sys.meta_path.remove(_copies)
        for name in [name for name, module in sys.modules.items() if isinstance(_loader(module), CopyLoader)]:
            del sys.modules[name]
        _copies = Copies(folder)
        if folder:  # after built-in modules, which have no files, and before the finder for files
            sys.meta_path.insert(sys.meta_path.index(PathFinder), _copies)
    return _copies


def use(folder: Path | None) -> None:
    """Uses the copies in a folder from now on, or with None, the original files."""
    os.environ[VARIABLE] = str(folder.absolute()) if folder else ""
    in_use()


def near(run: Path) -> Path | None:
    """The folder of the copies that a run uses: its own, or its experiment's; None if there are no copies."""
    candidates = (folder / FOLDER for folder in (run.absolute(), *run.absolute().parents[:2]))
    return next((folder for folder in candidates if (folder / INDEX).exists()), None)


def exists(file: Path) -> bool:
    """True if a file, or the copy of it that is in use, exists."""
    copies = in_use().by_file
    # unlike Path.is_file, isfile does not raise if the file is in a folder that only its owner may enter
    return os.path.isfile(file) or (bool(copies) and file.resolve() in copies)  # noqa: PTH113


def source(file: Path) -> Path:
    """The copy of a file if one is in use, otherwise the file itself."""
    copies = in_use().by_file
    return copies.get(file.resolve(), file) if copies else file


def editable(name: str) -> Path | None:
    """The file of a module that `pip install -e` finds by a finder of its own; nothing is imported.

    None for what is in the environment's folder, such as `src`, into which pip clones a repository.
    """
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "").startswith("_Editable"):
            spec = _spec_by(finder, name)
            file = Path(spec.origin).resolve() if spec and spec.has_location and spec.origin else Path()
            if file.suffix == ".py" and not _is_installed(file, file.parent):
                return file
    return None


@cache
def shared_projects(python_path: str) -> tuple[Path, ...]:
    """Folders anywhere whose modules are the user's, as those of the project are: the folders in PYTHONPATH, and the
    projects that `pip install -e` has installed; except the clone of this package.
    """
    from importlib.metadata import distributions  # workers of user code need none of this
    from urllib.parse import unquote, urlsplit

    records = (distribution.read_text("direct_url.json") for distribution in distributions())
    origins = (json.loads(record) for record in records if record)
    urls = [origin["url"] for origin in origins if origin.get("dir_info", {}).get("editable")]
    paths = [*filter(None, python_path.split(os.pathsep)), *(unquote(urlsplit(url).path) for url in urls)]
    folders = [Path(path).resolve() for path in paths]
    return tuple(folder for folder in folders if folder != Path(__file__).resolve().parents[1])


def _spec_by(finder: Any, name: str) -> ModuleSpec | None:
    """The spec of a module. Setuptools' finder knows packages and the modules in them, but not what is deeper."""
    spec: ModuleSpec | None = finder.find_spec(name, None)
    parent = name.rpartition(".")[0]
    if spec or not parent:
        return spec
    package = _spec_by(finder, parent)
    return PathFinder.find_spec(name, package.submodule_search_locations or []) if package else None


def spec_of(name: str, file: Path) -> ModuleSpec | None:
    """The spec that imports a file, or the copy in use, as the module `name`."""
    if file.resolve() not in in_use().by_file:
        return spec_from_file_location(name, file)
    package = [str(file.parent)] if file.stem == "__init__" else None
    return spec_from_file_location(name, file, loader=CopyLoader(name, str(file)), submodule_search_locations=package)


def require_copies(file: Path, modules: Mapping[str, ModuleType]) -> None:
    """Checks that a run has copies of all files of the project that a function's file imported.

    Args:
        file: file of the function. Without a copy of it, nothing is checked.
        modules: the modules that its import has added.

    Raises:
        UserError: a module is not in a copy, because it was found in a way that the text of `file` does not show.
    """
    copies, own = in_use().by_file, file.resolve()
    for name, module in modules.items() if own in copies else ():
        other = Path(str(getattr(module, "__file__", None)))  # some of torch's are not paths
        if not other.is_absolute() or other.suffix != ".py" or (other := other.resolve()) in copies:
            continue
        outside = not any(other.is_relative_to(folder) for folder in (Path.cwd().resolve(), own.parent))
        depth = getattr(getattr(module, "__spec__", None), "name", name).count(".") + (other.stem == "__init__")
        if outside or not other.exists() or _is_installed(other, other.parents[: depth + 1][-1]):
            continue
        raise UserError(
            f"{file}: the run has no copy of {other}, which it imports from a folder that it adds to sys.path, or by "
            "importlib, and would not notice an edit; import it with an `import` statement, from the folder of "
            f"{file.name} or from a folder on PYTHONPATH"
        )


def _is_installed(file: Path, root: Path) -> bool:
    """True for files of Python, of this package, of the Hub's libraries, and of packages that pip installed, also with
    `--target`.
    """
    hub = os.environ.get("HF_MODULES_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "modules")
    own = (sys.base_prefix, sys.prefix, Path(__file__).parent, Path(hub).expanduser())
    return (
        any(file.is_relative_to(Path(folder).resolve()) for folder in own)
        or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
        or any(root.glob("*.dist-info"))
    )


def _loader(module: ModuleType) -> object:
    return getattr(getattr(module, "__spec__", None), "loader", None)


def _read(folder: Path) -> dict[Path, str]:
    """Reads the index of a folder: file → path of its copy. Paths in the index are relative to it, so that a project
    can be moved.
    """
    with naming(folder / INDEX):
        entries = json.loads((folder / INDEX).read_text(encoding="utf-8"))["files"]
    return {Path(os.path.normpath(folder / file)).resolve(): entry["copy"] for file, entry in entries.items()}
