"""Processes of one training job: who this one is, and how a stage starts the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import progress, rank


class Rank(NamedTuple):
    """This process among those of the job."""

    number: int
    world: int
    local: int

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.number == 0


def current() -> Rank:
    """The rank from the environment that torchrun (or a lone process) has."""
    env = os.environ
    return Rank(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0")))


def alone() -> None:
    """Gives a lone process the rank environment that DeepSpeed asks for, with a free port."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Runs `rloo ARGUMENTS` as `processes` ranks on this machine and waits for them.

    The first rank tells its progress where this process does (progress.TERMINAL); the others' words go to the log.

    Raises:
        UserError: a rank failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    terminal = f"/proc/{os.getpid()}/fd/{progress.console.file.fileno()}"
    with tempfile.TemporaryDirectory(prefix="rloo-ranks-") as scratch:  # torchrun leaves folders of its own behind
        failed = Path(scratch) / "failed"
        outcome = subprocess.run(
            [*command, "-m", "rloo_pipeline", *arguments],
            env={**os.environ, progress.TERMINAL: terminal, "TMPDIR": scratch, rank.FAILED: str(failed)},
            check=False,
        )
        why = rank.why_failed(failed, f"exit code {outcome.returncode}; the log has what it said")
    if outcome.returncode != 0:
        raise UserError(f"one of the {processes} ranks failed: {why}")


def chip() -> str:
    """`cuda` or `cpu`: what DeepSpeed and torch compute on in this process."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
