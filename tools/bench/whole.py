"""Whole runs: our rounds by Snakemake, and TRL's RLOOTrainer through as many steps of the same work.

Both start from the same policy 0 and prompts and end with the last policy on disk, and on both sides a process's whole
life counts, imports and engines' starts included. Left out on both are the warm start, its checks, evaluation and
report. `EMPTY_RLOO` in place of `rloo` gives the floor: Snakemake with the same rules, whose jobs only make their
outputs.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
BIN = os.path.dirname(os.path.abspath(sys.executable))  # noqa: PTH100, PTH120 - as it is called, ..s gone
PARTS = (
    *("Snakefile", "workflow", "config", "profiles", "rloo_pipeline", "requirements", "containers", "tools", ".test"),
    *("snakemake_executor_plugin_rloo_slurm", "snakemake_logger_plugin_rloo"),
)
EMPTY_RLOO = """#!/bin/sh
# makes what a stage would write, and nothing in it
stage=$1
shift
while [ $# -gt 0 ]; do
    case $stage$1 in
    update--output) mkdir -p "$2" "${2%/*/*}/trainer/${2##*/}" ;;
    stage-assets--output | prompts--output | warmstart--output) mkdir -p "$2" ;;
    score--held-out) : >"$3" ;;
    *--output | *--metrics | *--events | *--table | *--held-out) : >"$2" ;;
    esac
    shift
done
"""


class Measured(NamedTuple):
    """Time and output of a command."""

    seconds: float
    cpu_seconds: float
    """Of all its processes."""
    stdout: str
    """Its standard output."""


class Project:
    """This repository, with results of its own."""

    def __init__(self, folder: Path, run: str, *configuration: str) -> None:
        """Args: an empty folder, the run's name, and the options of Snakemake for its configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in PARTS:
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(ROOT / name)
        self.folder, self.configuration = folder, configuration
        self.run = folder / "results" / run

    def snakemake(self, *targets: str, environment: Mapping[str, str] | None = None) -> Measured:
        """Makes these files of the run."""
        names = [str((self.run / target).relative_to(self.folder)) for target in targets]
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *self.configuration, "--", *names]
        return run_measured(command, self.folder, environment or {})

    def start(self, environment: Mapping[str, str] | None = None) -> Project:
        """Makes all that comes before the first round."""
        self.snakemake("prompts", "policies/00000", "warmstart/checks.json", environment=environment)
        return self

    def copy(self, folder: Path) -> Project:
        """A copy in another folder, with the files written so far."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder, self.run.name, *self.configuration)

    def rounds(self, last: int, environment: Mapping[str, str] | None = None) -> Measured:
        """Runs up to the policy of this round."""
        return self.snakemake(f"policies/{last:05d}", environment=environment)

    def on_slurm(self, configuration: str, last: int, nodes: int, *options: str) -> None:
        """Runs up to the policy of this round in one SLURM job of these nodes, with a core of each.

        Args:
            configuration: file with the run's name.
            last: number of the round.
            nodes: number of nodes of the job.
            options: further options of Snakemake.

        Raises:
            SystemExit: the job failed.
        """
        target = str((self.run / "policies" / f"{last:05d}").relative_to(self.folder))
        resources = (f"--nodes={nodes}", "--cpus-per-node=1", "--time=120", "--sbatch=mem=12000")
        command = [sys.executable, "-m", "rloo_pipeline", "submit", configuration, *resources, "--"]
        run_measured([*command, *options, *self.configuration, "--", target], self.folder, {})
        in_queue = ["squeue", "-h", "-n", f"rloo-{self.run.name}"]
        while (queue := subprocess.run(in_queue, capture_output=True, check=False)).returncode or queue.stdout.strip():
            time.sleep(1)  # also while SLURM does not answer
        outcome = self.run / "logs" / "submit" / "outcome.json"
        if not outcome.exists() or json.loads(outcome.read_text())["outcome"] != "done":
            raise SystemExit(f"{outcome.parent}: the job did not end well")

    def _ends(self, rounds: int) -> list[float]:
        """When each round ended, in seconds since 1970."""
        files = [self.run / "rounds" / f"{number:05d}" / "metrics.json" for number in range(1, rounds + 1)]
        return [file.stat().st_mtime for file in files]

    def seconds(self, rounds: int) -> list[float]:
        """Of each round but the first, which has the engines' starts in it."""
        return [end - begin for begin, end in pairwise(self._ends(rounds))]

    def worked(self, rounds: int) -> list[float]:
        """Of these: what the stages say that sampling, log-probs and optimizer steps took."""
        names = [f"{number:05d}" for number in range(2, rounds + 1)]
        return [sum(ended - began for began, ended in self._engines(name)) for name in names]

    def _engines(self, name: str) -> list[tuple[float, float]]:
        """When the engines of the rounds with this name, a pattern, worked: begin and end as the stages' logs say."""
        logs = self.run / "logs"
        log_files = [
            *logs.glob(f"rollout/{name}-*.log"),
            *logs.glob(f"reference/{name}-*.log"),
            *logs.glob(f"refill*/{name}.log"),
            *logs.glob(f"update/{name}.log"),
        ]
        last = [logged(log.read_text(), r"(?:sampled|computed|trained) in ([\d.]+) s") for log in log_files]
        return [(ended - seconds, ended) for ended, seconds in last]

    def idle_share(self, rounds: int) -> float:
        """Share of the time from the end of round 1 to that of round `rounds` in which no engine works."""
        return sum(self.idle(rounds)) / sum(self.seconds(rounds))

    def idle(self, rounds: int) -> list[float]:
        """Seconds of each round but the first in which no engine works, wherever it runs."""
        work = sorted(self._engines("*"))
        return [_free(work, begin, end) for begin, end in pairwise(self._ends(rounds))]

    def tokens(self, rounds: int) -> int:
        """Sampled in all rounds."""
        import pyarrow.parquet as pq

        tables = (self.run / "rounds").glob("*/rollouts/*.parquet")
        tables_read = [pq.read_table(table, columns=["completion_ids"], partitioning=None) for table in tables]
        assert len(tables_read) >= rounds
        return sum(len(ids) for table in tables_read for ids in table["completion_ids"].to_pylist())


def slurm_runs(part: str) -> bool:
    """Asks whether a SLURM answers, and says on stderr that a part is left out where none does."""
    if shutil.which("sinfo") and not subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        return True
    print(f"bench: {part}: left out, since there is no SLURM here", file=sys.stderr, flush=True)
    return False


def empty_rloo(folder: Path) -> dict[str, str]:
    """An environment in which `rloo` is EMPTY_RLOO."""
    folder.mkdir()
    file = folder / "rloo"
    file.write_text(EMPTY_RLOO)
    file.chmod(0o755)
    return {"PATH": os.pathsep.join([str(folder), BIN, os.environ["PATH"]])}


def logged(log: str, pattern: str) -> tuple[float, float]:
    """When the last line with this pattern was logged, in seconds since 1970, and the number in it."""
    second, thousandths, value = re.findall(rf"^(\S+ \S+?),(\d+) .*{pattern}", log, re.MULTILINE)[-1]
    at = datetime.fromisoformat(second) + timedelta(milliseconds=int(thousandths))
    return at.timestamp(), float(value)


def _free(work: list[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds from `begin` to `end` outside these spans of time, which are in the order of their begin."""
    free, until = 0.0, begin
    for began, ended in [*work, (end, end)]:
        free += max(0.0, min(began, end) - until)
        until = max(until, ended)
    return free


def trl(project: Project, threads: int) -> Measured:
    """TRL through the rounds of the project's run."""
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    script = str(Path(__file__).with_name("trl_run.py"))
    run = str(project.run.relative_to(project.folder))
    return run_measured([sys.executable, script, run, "trl"], project.folder, environment | {"HF_HUB_OFFLINE": "1"})


def script(name: str, *arguments: object, **variables: str) -> str:
    """The output of a script of this folder, run in a separate process.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if outcome.returncode:
        raise SystemExit(outcome.stderr[-3000:])
    return outcome.stdout


def run_measured(command: list[str], folder: Path, environment: Mapping[str, str]) -> Measured:
    """Runs a command and measures it.

    Raises:
        SystemExit: it failed.
    """
    path = os.pathsep.join([BIN, os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment}
    _adopt_orphans()
    others, before, began = set(_children()), _cpu_seconds(), time.monotonic()
    with (folder / "stdout.txt").open("w+") as stdout, (folder / "stderr.txt").open("w+") as errors:
        code = subprocess.Popen(command, cwd=folder, env=variables, stdout=stdout, stderr=errors).wait()
        seconds = time.monotonic() - began
        while workers := set(_children()) - others:  # workers end soon after the Snakemake that started them
            for child in workers:
                os.waitpid(child, 0)
        stdout.seek(0)
        errors.seek(0)
        if code:
            raise SystemExit(f"{' '.join(command)}: {errors.read()[-3000:]}")
        return Measured(seconds, _cpu_seconds() - before, stdout.read())


@contextmanager
def watching(look: Callable[[], T]) -> Iterator[list[T]]:
    """Calls a function ten times a second, and fills a list with what it returns."""
    found, ended = list[T](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            found.append(look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends, so that it can wait for them."""
    PR_SET_CHILD_SUBREAPER = 36  # Linux, prctl(2)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    """Numbers of the processes that this one is to wait for."""
    return [child.pid for child in psutil.Process().children()]


def _cpu_seconds() -> float:
    """Of all descendants that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def against_trl(figures: dict[str, list[float]], name: str, project: Project, rounds: int, threads: int) -> None:
    """Runs both sides, ours first."""
    our_run, trl_run = project.rounds(rounds), trl(project, threads)
    add(figures, f"{name}_time_vs_trl", [trl_run.seconds / our_run.seconds])
    add(figures, f"{name}_cpu_time_vs_trl", [trl_run.cpu_seconds / our_run.cpu_seconds])
    add(figures, f"{name}_tokens_vs_trl", [project.tokens(rounds) / last_line(trl_run.stdout)["tokens"]])
    print(
        f"bench: {name}: ours {our_run.seconds:.1f} s ({our_run.cpu_seconds:.1f} s of CPU), "
        f"TRL {trl_run.seconds:.1f} s ({trl_run.cpu_seconds:.1f} s of CPU)",
        file=sys.stderr,
        flush=True,
    )


def add(figures: dict[str, list[float]], name: str, values: list[float]) -> None:
    """Adds values to those of a number."""
    figures.setdefault(name, []).extend(values)


def last_line(text: str) -> Any:
    """The JSON in the last line that a script printed."""
    return json.loads(text.splitlines()[-1])
