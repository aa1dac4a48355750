"""Files that another node has just written, on a shared file system that shows them late.

NFS remembers for up to a minute that a file was missing, and asks its server for a folder's entries when the folder is
opened. So a node that has looked for a file too early sees it only then.
"""

import os
from contextlib import suppress
from pathlib import Path


def exists(path: Path) -> bool:
    """True if a file exists; opens its folder before a missing file counts as missing."""
    if path.exists():
        return True
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY))
    return path.exists()
