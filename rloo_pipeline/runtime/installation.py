"""Finds the workflow that belongs to this package: Snakefile, workflow/, profiles/, containers/, config/ and
requirements/. `python -m rloo_pipeline.runtime.installation` prints it.
"""

import csv
from functools import cache
from importlib.resources import files
from pathlib import Path

DEFAULT_CONFIG = Path("config/config.yaml")
"""The default configuration of a project, relative to its folder: Snakemake's usual place."""
NO_PROJECT = " in this folder; name one, go to the folder of a project, or make one with `rloo init`"
"""End of the error message if a folder has no project."""
PACKAGE = Path(str(files("rloo_pipeline")))


@cache
def csv_rows(path: str) -> list[dict[str, str]]:
    """The rows of a CSV file of this package, such as `config/excluded.csv`."""
    with (PACKAGE / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def clone() -> Path | None:
    """The clone that this package is used from; None if it was installed from a wheel."""
    return None if (PACKAGE / "project").is_dir() else PACKAGE.parent


def root() -> Path:
    """The folder of the workflow: the clone, or rloo_pipeline/project/ of a wheel, which setup.py puts there."""
    return clone() or PACKAGE / "project"


def snakefile(project: Path) -> Path:
    """The Snakefile that a project runs: its own, or else the workflow's.

    Args:
        project: the working folder.
    """
    own = (project / name for name in ("Snakefile", "workflow/Snakefile"))
    return next((file for file in own if file.is_file()), root() / "Snakefile")


def snakefile_option(project: Path) -> list[str]:
    """Arguments that point Snakemake to the Snakefile of a project; none if it finds the project's own."""
    file = snakefile(project)
    return [] if file.is_relative_to(project) else ["--snakefile", str(file)]


def profile(name: str) -> str:
    """The folder of a profile: in profiles/ of this folder, in this folder, or else in the workflow. Any other name is
    returned as it is, since Snakemake looks for it among the user's profiles.
    """
    folders = (Path("profiles") / name, Path(name), root() / "profiles" / name)
    return next((str(folder) for folder in folders if folder.is_dir()), name)


if __name__ == "__main__":
    print(root())
