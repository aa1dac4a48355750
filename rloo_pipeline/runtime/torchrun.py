"""Starts the ranks of a stage on this machine with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import progress, ranks


def launch(processes: int, arguments: Sequence[str]) -> None:
    """Runs `rloo ARGUMENTS` as `processes` ranks on this machine and waits for them.

    Rank 0 shows its progress on the terminal of this process (progress.TERMINAL); the others write to the log only.

    Raises:
        UserError: a rank failed.
    """
    terminal = f"/proc/{os.getpid()}/fd/{progress.console.file.fileno()}"
    with tempfile.TemporaryDirectory(prefix="rloo-ranks-") as scratch:
        failed = Path(scratch) / "failed"
        outcome = subprocess.run(
            command(processes, arguments),
            env=os.environ | environment(Path(scratch), failed) | {progress.TERMINAL: terminal},
            check=False,
        )
        why = ranks.why_failed(failed, outcome.returncode)
    if outcome.returncode != 0:
        raise UserError(f"one of the {processes} ranks failed: {why}")


def command(processes: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs `rloo ARGUMENTS` as `processes` ranks on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*torchrun, "-m", "rloo_pipeline", *arguments]


def environment(scratch: Path, failed: Path) -> dict[str, str]:
    """Environment variables for `command`.

    Args:
        scratch: TMPDIR of torchrun, which leaves folders there.
        failed: file to which the first rank that fails writes its error.
    """
    return {"TMPDIR": str(scratch), ranks.FAILED: str(failed)}
