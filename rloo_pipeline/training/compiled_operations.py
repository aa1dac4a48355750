"""Operations that DeepSpeed compiles for the processor at hand when they are first used (`deepspeed.offload`).

torch keeps what is compiled in the cache folder, and one process of a host compiles at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches

BATON = "lock"
"""torch's file for a compilation that is under way. It stays if that process is killed, and all others then wait."""


@contextmanager
def compiling(what: str, needs: str) -> Iterator[None]:
    """A block in which DeepSpeed may compile.

    Args:
        what: is compiled, as an error names it.
        needs: what that needs on the machine.

    Raises:
        UserError: it cannot be compiled here, or not by one process at a time.
    """
    folder = _folder()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # ninja is there
    with _locked(folder):
        try:
            yield
        except RuntimeError as error:
            raise UserError(
                f"deepspeed.offload: DeepSpeed cannot compile {what} here ({error.__cause__ or error}); it needs "
                f"{needs}, which the image for GPUs has; install that, or leave the key out"
            ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder of this host, and removes the batons that killed ones have left there."""
    with (folder / "rloo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when its process ends, so its holder may remove a baton
        except OSError as error:
            raise UserError(
                f"{folder}: this file system has no locks ({error}), which deepspeed.offload needs to compile "
                "operations; set TORCH_EXTENSIONS_DIR to a folder on a disk of the node"
            ) from error
        for baton in folder.glob(f"*/{BATON}"):
            baton.unlink(missing_ok=True)
        yield


def _folder() -> Path:
    """A folder for what is compiled on this host: another one may lack its instructions, and may not see its locks."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kind = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", caches.cache_folder() / "torch_extensions"))
    digest = hashlib.sha256(f"{sys.version}{torch.__version__}{kind}{socket.gethostname()}".encode()).hexdigest()[:12]
    folder = root if root.name == digest else root / digest
    folder.mkdir(parents=True, exist_ok=True)
    return folder
