"""Copies of the user's functions in a run's or experiment's folder: written at its start, used by its jobs."""

import os
from collections.abc import Iterable
from pathlib import Path

from rloo_pipeline import frozen_functions
from rloo_pipeline.artifacts import files
from rloo_pipeline.config import Config, provenance
from rloo_pipeline.errors import UserError
from rloo_pipeline.frozen_functions import FOLDER, INDEX

DIGEST = "sha256"


def folder_of(run: Path) -> Path:
    """The folder that holds the copies of a run or an experiment."""
    return run.absolute() / FOLDER


def use(run: Path) -> None:
    """Uses the copies of a run or of its experiment, if there are any; older runs have none.

    Raises:
        UserError: a copy was changed or is missing.
    """
    folder = frozen_functions.near(run)
    if folder and str(folder) != frozen_functions.in_use().folder:
        verify(folder)
    frozen_functions.use(folder)


def restore(folder: Path) -> None:
    """Restores copies that a kill left under a temporary name, between the two renames that replace the folder."""
    for left in sorted(folder.parent.glob(f".{folder.name}.*.tmp")):
        if not folder.exists() and (left / INDEX).exists():  # the index is written last
            left.rename(folder)


def verify(folder: Path) -> None:
    """Checks the copies in a folder.

    Raises:
        UserError: a copy was changed or is missing.
    """
    remedy = f"put it back, or delete {folder} to begin with your files as they are now"
    for entry in files.read_artifact(folder / INDEX, remedy)["files"].values():
        copy = folder / entry["copy"]
        if not copy.is_file() or files.sha256(copy) != entry[DIGEST]:
            raise UserError(f"{copy} was changed or removed since the run began; {remedy}")


def write(folder: Path, configs: Iterable[Config]) -> None:
    """Copies the files of all functions that these configurations name; rewrites only what changed.

    A file that is used through a copy is copied from there. Writes nothing if the user has no functions.

    Raises:
        UserError: a configuration names a function that does not exist.
    """
    sources = sorted({file for config in configs for file in files_of(config)})
    texts = {file: frozen_functions.source(file).read_bytes() for file in sources}
    names = {file: _name(file) for file in sources}
    if not texts or (texts, names) == _written(folder):
        return
    with files.atomic_folder(folder) as temporary:
        entries = {}
        for file, text in texts.items():
            copy = temporary / names[file]
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text)
            entries[_relative(file, folder)] = {"copy": names[file], DIGEST: files.sha256(copy)}
        files.write_json(temporary / INDEX, {"files": entries})


def files_of(config: Config) -> dict[Path, str]:
    """The files of all user functions that a configuration names, and their digests.

    Raises:
        UserError: the configuration names a function that does not exist.
    """
    references = dict.fromkeys(provenance.functions(config, Config.model_fields))
    return {file: digest for name in references for file, digest in provenance.function_files(name).items()}


def _written(folder: Path) -> tuple[dict[Path, bytes], dict[Path, str]]:
    """Contents and names of the copies in a folder."""
    if not (folder / INDEX).exists():
        return {}, {}
    copies = frozen_functions.Copies(str(folder)).by_file
    return (
        {file: copy.read_bytes() for file, copy in copies.items()},
        {file: str(copy.relative_to(folder)) for file, copy in copies.items()},
    )


def _name(file: Path) -> str:
    """Path of a copy in its folder: the file's path in the project, or a name with a digest of the file's folder."""
    project = Path.cwd().resolve()
    if file.is_relative_to(project):
        return str(file.relative_to(project))
    import hashlib

    return f"outside/{hashlib.sha256(str(file.parent).encode()).hexdigest()[:8]}/{file.name}"


def _relative(file: Path, folder: Path) -> str:
    """Path of a file in the index: relative to the index's folder within the project, so both can move together."""
    project = Path.cwd().resolve()
    return (
        os.path.relpath(file, folder) if file.is_relative_to(project) and folder.is_relative_to(project) else str(file)
    )
