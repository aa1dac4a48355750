"""DeepSpeed's AdamW for CPUs, whose moments and float32 weights are in host memory (`deepspeed.offload.optimizer`).

DeepSpeed compiles it for this processor when it is first used, and torch keeps the result in the cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches, guard

if TYPE_CHECKING:
    from torch.optim import Optimizer

BATON = "lock"
"""torch's lock file while it compiles. If that process is killed, the file stays and all others wait for it."""


def build(groups: Iterable[dict[str, Any]], **options: Any) -> Optimizer:
    """DeepSpeedCPUAdam with decoupled weight decay, over groups of parameters with AdamW's options.

    Raises:
        UserError: it cannot be compiled here, or the file system has no locks against other processes.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    guard.require("deepspeed")
    folder = _folder()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # where ninja is installed
    with _locked(folder):
        try:
            optimizer: Any = DeepSpeedCPUAdam(groups, **options)
        except RuntimeError as error:
            raise UserError(
                f"deepspeed.offload: DeepSpeed cannot compile its AdamW for CPUs here ({error.__cause__ or error}); it "
                "needs g++, which the image for GPUs has; install that, or leave the key out"
            ) from error
    optimizer.register_step_pre_hook(_recreate)
    return optimizer  # type: ignore[no-any-return]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes of this host, and removes the lock file that a killed one has left."""
    with (folder / "rloo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process, so any baton that its holder finds is stale
        except OSError as error:
            raise UserError(
                f"{folder}: this file system has no locks ({error}), which deepspeed.offload needs to compile AdamW; "
                "set TORCH_EXTENSIONS_DIR to a folder on a disk of the node"
            ) from error
        (folder / "cpu_adam" / BATON).unlink(missing_ok=True)
        yield


def _recreate(optimizer: Any, *_: object) -> None:
    """Recreates the compiled part before a step; its only state is the powers of β₁ and β₂ at the last step.

    From step to step it multiplies them by β, but after a resume it computes the powers directly, which rounds
    differently.
    """
    group = optimizer.param_groups[0]
    optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
    options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode, False)
    optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *options)


def _folder() -> Path:
    """A folder for compiled code, one per host and environment.

    Another host's CPU may lack some instructions, and it may not see the locks; with the headers of another environment
    torch would compile again.
    """
    import torch

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", caches.cache_folder() / "torch_extensions"))
    where = f"{sys.version}{sys.prefix}{torch.__version__}{caches.instructions()}{socket.gethostname()}"
    digest = hashlib.sha256(where.encode()).hexdigest()[:12]
    folder = root if root.name == digest else root / digest
    folder.mkdir(parents=True, exist_ok=True)
    return folder
