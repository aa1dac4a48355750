"""The folder for the caches of engines and libraries."""

from __future__ import annotations

import os
from pathlib import Path

from rloo_pipeline.runtime import scratch


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
    return scratch.user_folder() / f"rloo-{os.getuid()}"
