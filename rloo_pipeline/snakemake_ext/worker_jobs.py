"""Snakemake's own process hands a job to a worker, in place of a shell that starts an interpreter that does so.

`snakemake.shell` starts the command of a job with `subprocess.Popen` in a thread of Snakemake's process. Here that is a
function that looks whether the command is a plain `rloo STAGE …` and a worker is free, and then gives back what looks
like a process and is a connection. Everything else, and a stage whose worker dies, gets its shell. A shell and an
interpreter cost 70 ms a job: more than all that Snakemake does for it.

What ends the jobs of a run from outside, a signal to the terminal's process group, reaches shells and not workers. So
one process of that group does nothing but live, and a connection is closed when it does not: then the worker ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo_pipeline.workers import client
from rloo_pipeline.workers.client import Handed

PLAIN = re.compile(r"(?:set -euo pipefail; +)?rloo ([\w@%+=:,./ -]+)")
"""A command in which a shell would see nothing but words."""


def hand_over() -> None:
    """Has this process do so from now on, unless someone has put another `rloo` before that of this environment."""
    if shutil.which("rloo") != str(Path(sys.executable).parent / "rloo"):
        return
    signalled = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def popen(command: str, **settings: Any) -> subprocess.Popen[Any] | Job:
        plain = PLAIN.fullmatch(command) if settings.get("stdout") is not subprocess.PIPE else None
        handed = client.hand(plain[1].split()) if plain and signalled.poll() is None else None
        return Job(handed, signalled, command, settings) if handed else subprocess.Popen(command, **settings)

    replaced: Any = ModuleType(subprocess.__name__)
    replaced.__dict__.update(vars(subprocess), Popen=popen)
    # by its name, since snakemake.shell is also what it calls its function
    starts: Any = importlib.import_module("snakemake.shell")
    starts.sp = replaced


class Job:
    """What `snakemake.shell` needs of a process."""

    def __init__(
        self, handed: Handed, signalled: subprocess.Popen[bytes], command: str, settings: Mapping[str, Any]
    ) -> None:
        """Args: the stage, the process that signals are for, and how a shell is started if the worker fails."""
        self.pid = handed.worker
        self._handed, self._signalled, self._command, self._settings = handed, signalled, command, settings

    def wait(self) -> int:
        """The exit status; negative after a signal."""
        with contextlib.closing(self._handed):
            ended = self._ended_by()
            code = self._handed.answer() if ended is None else ended
        if code is None:
            environment = {name: value for name, value in self._settings["env"].items() if name != client.FOLDER}
            code = subprocess.Popen(self._command, **{**self._settings, "env": environment}).wait()
        return code

    def _ended_by(self) -> int | None:
        """Waits for the answer: None, or a failure if what signals are for ended before it, however it did."""
        handle = os.pidfd_open(self._signalled.pid)
        try:
            ready = select.poll()
            ready.register(self._handed.line, select.POLLIN)
            ready.register(handle, select.POLLIN)
            ended = handle in dict(ready.poll())
        finally:
            os.close(handle)
        return (self._signalled.wait() or 1) if ended else None
