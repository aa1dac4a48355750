"""Digests of the code that makes a stage's result, so that an edit reruns the stages it touches and no others.

The digest of a stage covers its own file, every module of this package that it imports, directly or through others,
and the files of functions that the configuration names, with what they import from beside them. Modules that cannot
change a result are left out.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from rloo_pipeline import references
from rloo_pipeline.config import STAGES, Config, estimator

PACKAGE = Path(__file__).parent
WITHOUT_EFFECT = {
    *("config", "config_file", "errors", "progress", "runtime", "provenance", "workers"),
    *("files", "fence", "lean"),
}


def source_digest(stage: str, config: Config) -> str:
    """Short digest of all code behind `stage` under this configuration.

    Raises:
        UserError: the configuration names a function that is not there.
    """
    decides = STAGES[stage].decides
    named = [references.check(reference) for reference in functions(config, decides)]
    own = PACKAGE / "stages" / f"{stage.replace('-', '_')}.py"
    files = {file for start in (own, *named) if start is not None for file in _closure(start.resolve())}
    digest = hashlib.sha256()
    for name, file in sorted((_name(file), file) for file in files):
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
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
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    split = [name.split(".") for name in names]
    own = [parts[1:] for parts in split if parts[0] == PACKAGE.name and parts[1:]]
    files = {_file_of(PACKAGE, parts) for parts in own if parts[0] not in WITHOUT_EFFECT}
    if not file.is_relative_to(PACKAGE):
        others = [parts for parts in split if parts[0] != PACKAGE.name]
        files |= {_file_of(file.parent, parts[:length]) for parts in others for length in range(1, len(parts) + 1)}
    return frozenset(found for found in files if found is not None)


def _file_of(folder: Path, parts: list[str]) -> Path | None:
    """The file of a module given by its name's parts below a folder; None where the name is of something inside a
    module, or of none that lies there.
    """
    path = folder.joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)
