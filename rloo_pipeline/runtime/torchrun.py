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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    terminal = f"/proc/{os.getpid()}/fd/{progress.console.file.fileno()}"
    with tempfile.TemporaryDirectory(prefix="rloo-ranks-") as scratch:  # torchrun leaves its own folders behind
        failed = Path(scratch) / "failed"
        outcome = subprocess.run(
            [*command, "-m", "rloo_pipeline", *arguments],
            env={**os.environ, progress.TERMINAL: terminal, "TMPDIR": scratch, ranks.FAILED: str(failed)},
            check=False,
        )
        why = ranks.why_failed(failed, outcome.returncode)
    if outcome.returncode != 0:
        raise UserError(f"one of the {processes} ranks failed: {why}")
