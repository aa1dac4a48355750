"""Shared by the tests of the cluster: projects whose jobs run on SLURM, and commands of SLURM."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import PLAIN, ROOT, Project, executable, mini


def missing(requirement: str) -> None:
    """Skips a test whose requirement is missing; fails it in CI."""
    if os.environ.get("CI"):
        pytest.fail(requirement, pytrace=False)
    pytest.skip(requirement)


def ask(*command: str) -> str:
    """The output of a SLURM command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


PATIENCE = 1500.0
"""Seconds to wait for what comes soon; long enough for a busy machine."""


def wait_until(condition: Callable[[], Any], event: str) -> Any:
    """Waits until `condition()` returns a true value, and returns it."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not in {PATIENCE:g} s: {event}"
        time.sleep(0.3)
    return answer


SCORES = "results/mini/rounds/00001/scores/000.parquet"
SLOW_ONCE = '''
import pathlib, time

def slow_once(completions, **_):
    """Takes far too long in its first call."""
    mark = pathlib.Path({mark!r})
    if not mark.exists():
        mark.touch()
        time.sleep(600)
    return [0.0] * len(completions)
'''

# keeps existing files, even if other code or parameters wrote them
GO_ON = ("--rerun-triggers", "mtime")


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
        self.environment["XDG_CONFIG_HOME"] = str(home)

    def command(self, *arguments: str) -> list[str]:
        """The documented arguments of snakemake, with waiting times for a small cluster."""
        quick = ("--seconds-between-status-checks=2", "--rloo-slurm-init-seconds-before-status-checks=1")
        return ["--profile", "slurm", "--sdm", "apptainer", PLAIN, *quick, *arguments]

    def start(self, *arguments: str, end: bool = True, **changes) -> subprocess.Popen[str]:
        """Starts the command without waiting for it; ends the previous command first, unless `end` is false."""
        self.configure(**changes)
        if end:
            self.end()
        with (self.folder / "snakemake.log").open("w") as log:
            self.started = subprocess.Popen(
                [sys.executable, "-m", "snakemake", "--configfile", "config/test.yaml", *self.command(*arguments)],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        return self.started

    def at_round_1(self, finished: Project, *removed: str) -> "Cluster":
        """Copies the finished run without what follows round 1 and without the files in `removed`."""
        run = self.folder / "results" / "mini"
        shutil.copytree(finished.folder / "results" / "mini", run)
        later = ("policies/00002", "rounds/00002", "trainer", "evaluation", "summary.json", "report.html")
        for name in (*later, *removed):
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
        return self

    def start_slow_score(self, finished: Project, *arguments: str) -> subprocess.Popen[str]:
        """Starts to score a shard with a reward that takes too long in its first call, and waits for that call."""
        self.at_round_1(finished, "rounds/00001/scores")
        mark = self.folder / "mark"
        (self.folder / "slow.py").write_text(SLOW_ONCE.format(mark=str(mark)))
        rewards = [*mini()["rewards"], {"function": "slow.py:slow_once", "weight": 0, "timeout": 600}]
        started = self.start(*GO_ON, *arguments, "--", SCORES, rewards=rewards)
        self.until(started, mark.exists, "the first row is scored")
        return started

    def rloo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `rloo ARGUMENTS` in this project's folder."""
        return subprocess.run(
            [sys.executable, "-m", "rloo_pipeline", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, *arguments: str, **changes) -> str:
        """Runs `rloo submit` with the configuration. Returns the id of its job."""
        self.configure(**changes)
        outcome = self.rloo("submit", "config/test.yaml", "--sbatch=mem=12000", *arguments)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        return outcome.stdout.split()[1].rstrip(";")

    def outcome(self, job: str) -> dict[str, Any]:
        """Waits until a submitted run has ended, and returns its outcome."""
        folder = self.folder / "results" / "mini" / "logs" / "submit"

        def read_outcome() -> dict[str, Any] | None:
            path, queued = folder / "outcome.json", job in ask("squeue", "-h", "-o", "%A").split()
            record = json.loads(path.read_text()) if path.exists() else {"outcome": "requeued"}
            assert record["outcome"] != "requeued" or queued, "the job is gone"
            return None if record["outcome"] == "requeued" else record

        try:
            return wait_until(read_outcome, "the submitted run ends")
        finally:
            print("".join(file.read_text() for file in folder.glob("*log.out")))

    def count_steps(self) -> Path:
        """Has submitted jobs write each call of srun into the file that is returned, a line each."""
        steps, programs = self.folder / "steps", self.folder / "programs"
        executable(programs, "srun", f'echo srun "$*" >>{steps}\nexec {shutil.which("srun")} "$@"')
        self.environment["PATH"] = f"{programs}:{self.environment['PATH']}"
        return steps

    def end(self) -> None:
        """Ends the command that was started, and its jobs."""
        if self.started and self.started.poll() is None:
            self.started.kill()
            self.started.wait()
        for job in ask("squeue", "-h", "-o", "%A").split():
            if self.holds(job):
                subprocess.run(["scancel", job], check=False)

    def logs(self) -> str:
        """The logs of failed jobs."""
        return "".join(log.read_text() for log in (self.folder / ".snakemake" / "slurm_logs").rglob("*.log"))

    def finish(self, started: subprocess.Popen[str]) -> None:
        """Waits for the command, which must succeed."""
        assert started.wait(PATIENCE) == 0, self.output()

    def output(self) -> str:
        """The output of the command that was started."""
        return (self.folder / "snakemake.log").read_text()

    def cancel(self, started: subprocess.Popen[str], job: str, named: str) -> None:
        """Cancels a job, which must end the run with a line that names it, and without a retry."""
        ask("scancel", job)
        assert started.wait(PATIENCE) == 1
        assert f"SLURM job {named} was cancelled" in self.output()
        assert "Trying to restart" not in self.output()

    def until(self, started: subprocess.Popen[str], condition: Callable[[], Any], event: str) -> Any:
        """Waits until `condition()` returns a true value while the command runs, and returns it."""

        def checked() -> Any:
            assert started.poll() is None, self.output()
            return condition()

        return wait_until(checked, event)

    def wait_for(self, started: subprocess.Popen[str], rule: str) -> tuple[str, str]:
        """Waits until a job of a rule runs. Returns its id and node."""
        return self.until(started, lambda: self.running(rule), f"a job of {rule} runs")

    def waiting_array(self, started: subprocess.Popen[str]) -> str:
        """Waits until an array job of this folder is pending. Returns its id."""

        def pending_array() -> str | None:
            waiting = (line.split() for line in ask("squeue", "-h", "-t", "pending", "-o", "%A %F %K").splitlines())
            return next((array for job, array, task in waiting if task != "N/A" and self.holds(job)), None)

        return self.until(started, pending_array, "an array job waits")

    def running(self, rule: str) -> tuple[str, str] | None:
        """Id and node of a running job of a rule; None where none runs."""
        for line in ask("squeue", "-h", "-t", "running", "-o", "%i %N %k").splitlines():
            job, node, comment = line.split(maxsplit=2)
            if comment.split("_wildcards")[0] == f"rule_{rule}" and self.holds(job):
                return job, node
        return None

    def holds(self, job: str) -> bool:
        """Whether a job runs in this folder."""
        return f"WorkDir={self.folder}\n" in ask("scontrol", "show", "job", job)
