"""What a process that is one of several of a stage knows of the others, and leaves to the one that started it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

RENDEZVOUS = "RLOO_MEETING"
"""Environment variable with the file by which ranks on several nodes find each other (cluster/nodes.py)."""


STEP = "RLOO_STEP"
"""Environment variable of stages that are steps of one SLURM job of several nodes (snakemake_ext/steps.py)."""


FAILED = "RLOO_FAILED"
"""Environment variable with the file in which ranks say why they failed. The first one counts: what the others see is
that it is gone.
"""


def is_rank() -> bool:
    """Whether this process is one of several that do a stage together."""
    return "TORCHELASTIC_RUN_ID" in os.environ or RENDEZVOUS in os.environ


def tell_launcher(why: str) -> None:
    """Where this process is a rank: leaves the sentence with which it ends to the stage that started it."""
    if is_rank() and FAILED in os.environ:
        with contextlib.suppress(OSError), open(os.environ[FAILED], "x") as file:
            file.write(why)


def why_failed(file: Path, words: str) -> str:
    """What ranks left in `file`, else `words`."""
    return file.read_text() if file.exists() and file.stat().st_size else words
