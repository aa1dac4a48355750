"""Shared by the tests of code_reward: the sandbox's limits, a program, a search among the machine's processes."""

import os

import psutil

from rloo_pipeline.user_code.sandbox.command_line import SandboxLimits

IMAGE = os.environ.get("RLOO_TEST_IMAGE", "")  # with no bwrap on PATH, the same tests go through Apptainer
LIMITS = SandboxLimits(20, 512, 8, 8)


def processes_with(marker: str) -> list[psutil.Process]:
    """Other processes of this machine with the marker in their command line."""
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if marker in " ".join(one.info["cmdline"] or ()) and one.pid != os.getpid()]


ADD = "def add(a, b):\n    return a + b\n"
