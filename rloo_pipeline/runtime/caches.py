"""The folder for caches."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """XDG_CACHE_HOME or ~/.cache, or a folder on the node's own disk where a node cannot write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"rloo-{os.getuid()}"
