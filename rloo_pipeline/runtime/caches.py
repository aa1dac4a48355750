"""The folder for the caches of engines and libraries."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """XDG_CACHE_HOME or ~/.cache; a folder in the temporary directory where this node cannot write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"rloo-{os.getuid()}"
