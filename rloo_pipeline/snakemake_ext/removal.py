"""Renames a folder before Snakemake removes its files, so that no part of it stays under its name.

A part stays after a kill, and on NFS also if a process, such as a notebook, has a file open: NFS keeps the file, and
rmdir fails. Snakemake would end there, and the next call would take the part for the whole folder.
"""

import shutil
import uuid
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import files
from rloo_pipeline.runtime import late_files
from rloo_pipeline.snakemake_ext.replacing import replaces
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


def rename_first(_: SnakemakeCall) -> None:
    """Patches Snakemake's removal of files in this process."""
    from snakemake import io

    @replaces(io, "remove")
    async def remove_renamed(
        remove: Any, file: Any, remove_non_empty_dir: bool = False, only_local: bool = False
    ) -> None:
        path, elsewhere = Path(file), file.is_storage and not only_local
        is_folder = remove_non_empty_dir and late_files.exists(path) and path.is_dir() and not path.is_symlink()
        if elsewhere or not is_folder:
            await remove(file, remove_non_empty_dir, only_local)
            return
        files.remove_temporary(path.parent, "*.removed")
        renamed = path.with_name(f".{path.name}.removed.{uuid.uuid4().hex[:8]}.tmp")
        files.rename(path, renamed)
        shutil.rmtree(renamed, ignore_errors=True)
