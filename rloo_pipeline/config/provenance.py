"""Digests of the code behind each stage, so that an edit reruns the stages it affects and no others.

The digest of a stage covers its own file, every module of this package that it imports, directly or indirectly, and the
files of functions that the configuration names, with the modules that these import from their own folder or package.
The digest of the benchmarks also covers the user's task files. Modules that cannot change a result are left out, and so
are imports under `if TYPE_CHECKING:` and those of installed libraries.

A Python file is digested as a syntax tree, in a form that is the same in Python 3.11 to 3.13, so comments, docstrings
and layout do not count.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate, product
from pathlib import Path

from rloo_pipeline import frozen_functions, import_string
from rloo_pipeline.config import STAGES, Config, estimator, syntax
from rloo_pipeline.frozen_functions import source

PACKAGE = Path(__file__).parent.parent
WITHOUT_EFFECT = {
    *("before_run", "config", "errors", "frozen_functions", "import_string", "runtime", "version", "workers"),
    *("artifacts.files", "artifacts.fence", "artifacts.function_copies", "artifacts.lineage", "artifacts.manifest"),
    *("trackers.events", "trackers.names", "rollout.swap_check", "training.formats"),
    *("training.sampler_proof", "training.model_support", "training.self_check"),
    "transformers_internals.optional_parts",
}
"""Modules and packages that decide where, when and how a result is computed, written or reported, but not its values.
"""
TASK_FILES = (".yaml", ".yml", ".py")
"""Suffixes of lm-eval's task files, which are digested as text."""


def source_digest(stage: str, config: Config) -> str:
    """Digest (16 hex digits) of all code behind `stage` under this configuration.

    Raises:
        UserError: the configuration names a function that does not exist.
    """
    # a stage that gets only some keys of `algorithm` or `dataset` gets none that names a function
    sections = [
        name for name, keys in STAGES[stage].decides.items() if keys is True or name not in ("algorithm", "dataset")
    ]
    config = config.model_copy(update={"rewards": config.rewards_of(stage)})
    files = {reference: import_string.check(reference) for reference in functions(config, sections)}
    stage_file = PACKAGE / "stages" / f"{stage.replace('-', '_')}.py"
    closures = [_closure(stage_file.resolve())]
    closures += [_closure(*_start(reference, file)) for reference, file in files.items() if file is not None]
    digests = {
        (_name(file), _digest(source(file), text)) for closure in closures for file, text in _with_text_flag(closure)
    }
    if "harness" in stage and config.evaluation.harness and (folder := config.evaluation.harness.include_path):
        files_of_tasks = (file for file in Path(folder).rglob("*") if file.suffix in TASK_FILES)
        digests |= {(str(file), _digest(file, as_text=True)) for file in files_of_tasks}
    syntax.keep()
    total = hashlib.sha256()
    for name, digest in sorted(digests):
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()[:16]


def source_files(reference: str, file: Path) -> frozenset[Path]:
    """The file of a user's function and all modules that it imports, directly or indirectly, except libraries."""
    return frozenset(file for file in _closure(*_start(reference, file)) if not file.is_relative_to(PACKAGE))


def function_files(reference: str) -> dict[Path, str]:
    """`source_files` of a function with their digests, without installed packages. Comments do not affect a digest.

    Raises:
        UserError: the function does not exist.
    """
    file = import_string.check(reference)
    if file is None:
        return {}
    roots = _start(reference, file)[1]
    files = frozenset(file for file in source_files(reference, file) if not _is_installed(file, roots))
    return {file: _digest(source(file), as_text) for file, as_text in _with_text_flag(files)}


def functions(config: Config, sections: Iterable[str]) -> Iterator[str]:
    """Import strings of the functions that these sections of the configuration name."""
    if "rewards" in sections:
        yield from (reward.function for reward in config.rewards)
    if "judge" in sections and config.judge is not None:
        yield config.judge.function
    if "rollout" in sections:
        yield from (*config.rollout.tools, *config.rollout.environments.values())
    for key, rows in config.row_sources.items():
        if key.partition(".")[0] in sections and rows.generator:
            yield rows.generator
    if "algorithm" in sections:
        yield estimator(config.algorithm.advantage)
        if config.algorithm.loss is not None:
            yield config.algorithm.loss
    if "model" in sections:
        yield from (source.build for source in config.model_sources if source.build)


def _name(file: Path) -> str:
    """A name for the file that does not depend on where the package is installed."""
    return str(file.relative_to(PACKAGE)) if file.is_relative_to(PACKAGE) else file.name


def _with_text_flag(closure: frozenset[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, with True if its text is digested instead of its syntax tree: files that are not Python, and all files
    of the user if one of them may read docstrings or source.
    """
    user_files = {file for file in closure if not file.is_relative_to(PACKAGE)}
    reads_text = any(syntax.facts(source(file)).reads_text for file in user_files if file.suffix == ".py")
    for file in closure:
        yield file, file.suffix != ".py" or (file in user_files and reads_text)


@cache
def _digest(file: Path, as_text: bool) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if as_text else syntax.facts(file).digest


def _start(reference: str, file: Path) -> tuple[Path, tuple[Path, ...], str]:
    """The real path of a function's file, the folders to search for imports (nearest first), and the folder of the
    copies in use, which is part of cache keys.

    For `package.module:function`, the search folder is the package's parent. For `path/file.py:function`, it is the
    file's folder and those above it up to the working folder, since a package may begin there. Folders that Python
    searches come last, if they are in the project, in PYTHONPATH, or of a package that `pip install -e` has installed.
    """
    file, module = file.resolve(), import_string.of_library(reference)[0].rpartition(":")[0]
    project, copies = Path.cwd().resolve(), frozen_functions.in_use().folder
    owned = (project, *frozen_functions.shared_projects(os.environ.get("PYTHONPATH", "")))
    searched = [folder for folder in map(Path.resolve, map(Path, sys.path)) if any(map(folder.is_relative_to, owned))]
    installed = [Path(prefix).resolve() for prefix in (sys.base_prefix, sys.prefix)]
    searched = [folder for folder in searched if not any(map(folder.is_relative_to, installed))]
    if not module.endswith(".py"):
        return file, (file.parents[module.count(".") + (file.name == "__init__.py")], *searched), copies
    above = (folder for folder in file.parent.parents if folder.is_relative_to(project))
    return file, (file.parent, *above, *searched), copies


@cache
def _closure(start: Path, roots: tuple[Path, ...] = (), copies: str = "") -> frozenset[Path]:
    """A file, the modules of this package or below `roots` that it imports, directly or indirectly, the Jinja templates
    of all of them, and the tables of those of this package.
    """
    files, queue = {start}, [start]
    while queue:
        for file in _imports(queue.pop(), roots, copies) - files:
            files.add(file)
            queue.append(file)
    return frozenset({*files, *(beside for file in files for beside in _beside(file))})


@cache
def _beside(file: Path) -> tuple[Path, ...]:
    """Templates of a Python file, and in this package its table, which has its name."""
    endings = ("*.j2", "csv", "toml") if file.is_relative_to(PACKAGE) else ("*.j2",)
    return tuple(beside for ending in endings for beside in file.parent.glob(f"{file.stem}.{ending}"))


@cache
def _imports(file: Path, roots: tuple[Path, ...], copies: str) -> frozenset[Path]:  # noqa: ARG001 - a key of the cache
    """Files of this package that a file imports anywhere in its code; for a user's file also files below `roots`."""
    names, relative = set[str](), set[tuple[Path, str]]()
    for level, module, imported in syntax.facts(source(file)).imports:
        if level:
            package = file.parents[level - 1]
            below = f"{package.name}.{module}" if module else package.name
            relative |= {(package.parent, f"{below}.{name}") for name in imported}
        elif module:
            names |= {module, *(f"{module}.{name}" for name in imported)}
        else:
            names |= {*imported}
    own = [name.split(".")[1:] for name in names if name.startswith(f"{PACKAGE.name}.")]
    files = {_file_of(PACKAGE, parts) for parts in own if not WITHOUT_EFFECT & {parts[0], ".".join(parts[:2])}}
    if not file.is_relative_to(PACKAGE) and not _is_installed(file, roots):
        others = [name for name in names if name.partition(".")[0] != PACKAGE.name]
        for folder, name in (*relative, *product(roots, others)):
            parts = name.split(".")
            files |= {_file_of(folder, parts[:length]) for length in range(1, len(parts) + 1)}
        files |= {
            frozen_functions.editable(before)
            for name in others
            for before in accumulate(name.split("."), "{}.{}".format)
        }
    return frozenset(found for found in files if found is not None)


def _is_installed(file: Path, roots: tuple[Path, ...]) -> bool:
    """True if a file is part of an installed package, in site-packages or where `pip install --target` put it."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return True
    above = (root for root in roots if file.is_relative_to(root))
    root = max(above, key=lambda root: len(root.parts), default=file.parent)
    package = f"\n{file.relative_to(root).parts[0]}/"
    return any(package in f"\n{record.read_text(encoding='utf-8')}" for record in root.glob("*.dist-info/RECORD"))


def _file_of(folder: Path, parts: list[str]) -> Path | None:
    """The file of the module `parts` below a folder; None if there is none, or if the last part names an object in a
    module.
    """
    path = folder.joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if frozen_functions.exists(candidate)), None)
