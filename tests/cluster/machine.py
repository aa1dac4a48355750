"""The test cluster: what its tests share."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, Project


def missing(what: str) -> None:
    """Without what they need these tests skip, but not where all of them are asked for."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what, pytrace=False)


def ask(*command: str) -> str:
    """What a command of SLURM says."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + seconds
    while not (answer := true()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.3)
    return answer


class Cluster(Project):
    """A copy of the sources with the built image, whose snakemake submits to SLURM."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.started: subprocess.Popen[str] | None = None
        (folder / "images").symlink_to(ROOT / "images")
        # as `make profiles` would, for this copy
        home = folder / "config-home"
        (home / "snakemake").mkdir(parents=True)
        shutil.copytree(ROOT / "profiles" / "slurm", home / "snakemake" / "slurm")
        self.environment |= {"XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(folder / "cache")}

    def command(self, *words: str) -> list[str]:
        """The documented words, with the waits of a small cluster."""
        quick = ("--seconds-between-status-checks=2", "--slurm-init-seconds-before-status-checks=1")
        return ["--profile", "slurm", "--sdm", "apptainer", *quick, *words]

    def start(self, *words: str, **changes) -> subprocess.Popen[str]:
        """Starts the command and comes back."""
        self.configure(**changes)
        self.end()
        with (self.folder / "snakemake.log").open("w") as log:
            self.started = subprocess.Popen(
                [sys.executable, "-m", "snakemake", "--configfile", "config/test.yaml", *self.command(*words)],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        return self.started

    def end(self) -> None:
        """Ends what was started, and its jobs."""
        if self.started and self.started.poll() is None:
            self.started.kill()
            self.started.wait()
        for job in ask("squeue", "-h", "-o", "%A").split():
            if self.holds(job):
                subprocess.run(["scancel", job], check=False)

    def logs(self) -> str:
        """What the jobs that failed have said."""
        return "".join(log.read_text() for log in (self.folder / ".snakemake" / "slurm_logs").rglob("*.log"))

    def finish(self, started: subprocess.Popen[str], seconds: float = 600) -> None:
        """Waits for the command, which must end well."""
        assert started.wait(seconds) == 0, self.said()

    def said(self) -> str:
        """What the command that was started has said."""
        return (self.folder / "snakemake.log").read_text()

    def wait_for(self, started: subprocess.Popen[str], rule: str, seconds: float = 600) -> tuple[str, str]:
        """Id and node of a rule's job, once it runs."""

        def found() -> tuple[str, str] | None:
            assert started.poll() is None, self.said()
            return self.running(rule)

        return wait_until(found, seconds, f"a job of {rule} runs")

    def running(self, rule: str) -> tuple[str, str] | None:
        """Id and node of a running job of a rule."""
        for line in ask("squeue", "-h", "-t", "running", "-o", "%A %N %k").splitlines():
            job, node, comment = line.split(maxsplit=2)
            if comment.split("_wildcards")[0] == f"rule_{rule}" and self.holds(job):
                return job, node
        return None

    def holds(self, job: str) -> bool:
        """Whether a job works in this folder."""
        return f"WorkDir={self.folder}\n" in ask("scontrol", "show", "job", job)
