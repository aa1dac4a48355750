"""Shared by the tests of code_reward: the sandbox's limits, a program, a search among the machine's processes."""

import os
from pathlib import Path

from rloo_pipeline.sandbox.command_line import SandboxLimits

IMAGE = os.environ.get("RLOO_TEST_IMAGE", "")  # with no bwrap on PATH, the same tests go through Apptainer
LIMITS = SandboxLimits(20, 512, 8, 8)


def processes_with(marker: str) -> list[str]:
    """Processes of this machine with the marker in their command line."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in line and int(file.parent.name) != os.getpid():
            lines.append(line)
    return lines


ADD = "def add(a, b):\n    return a + b\n"
