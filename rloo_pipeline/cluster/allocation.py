"""Snakemake inside of one SLURM job that outlives its time limit: what `rloo submit` puts into the queue.

Before the job's time is up, by a deadline that is reckoned from its end, Snakemake is told to start nothing more. What
runs may end by itself until shortly before the end; then it is stopped, to be made again, since a stage's files are
whole or absent. The job goes back into the queue under its own number and goes on where it was.

A job that SLURM itself puts back (preemption, a dead node) goes on likewise. A stage that fails ends the job, and so
does a whole allocation in which no stage was finished: the next one would not finish one either.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple

from rloo_pipeline.artifacts import files
from rloo_pipeline.cluster import slurm

OUTCOME = "outcome.json"
STOP = "stop"
"""A file with this name beside the outcome asks a controller to cancel its jobs and to end."""
LONGEST_MARGIN = 1800.0
LAST_SECONDS = 60.0


class Plan(NamedTuple):
    """What a job does."""

    words: list[str]
    """Arguments of Snakemake."""
    project: Path
    """The folder that it is called in."""
    folder: Path
    """Where the outcome goes."""
    controller: bool
    """Whether the stages are SLURM jobs of their own."""
    margin: float | None
    """Seconds before the end from which on nothing more is started; a tenth of the time, half an hour at most, where
    not given.
    """


class _Watch:
    """Hands Snakemake's lines on, counts the stages that it finishes, and sees whether those are all: it ends with an
    error where it is stopped, even then.
    """

    def __init__(self, lines: IO[str]) -> None:
        self.finished = 0
        self.complete = False
        self._lines = lines
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._lines:
            self.finished += line.startswith("Finished jobid:")
            if steps := re.match(r"(\d+) of (\d+) steps ", line):
                self.complete = steps[1] == steps[2]
            print(line, end="", flush=True)

    def close(self) -> None:
        """Waits for the last line."""
        self._thread.join(10)


def work(plan: Plan) -> None:
    """Runs Snakemake until the run is done or the job's time is nearly up; in that case requeues the job.

    Exits with 1 where a stage failed.
    """
    number = slurm.own_job() or ""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    (plan.folder / STOP).unlink(missing_ok=True)
    began, end = time.time(), slurm.end_of(number)
    margin = 0.0 if end is None else _margin(plan, end - began)
    _say(f"allocation {_allocations()} of job {number}" + (f", {_minutes(end - began)} minutes" if end else ""))
    snakemake = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *plan.words],
        cwd=plan.project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    assert snakemake.stdout
    watch = _Watch(snakemake.stdout)
    stopping = _wait(snakemake, plan, end, margin)
    watch.close()
    done = snakemake.returncode == 0 or watch.complete
    if told and not done:  # SLURM ends the job, to cancel or to requeue it
        time.sleep(300)
    elif done:
        _leave(plan, "done", "the run is done")
    elif stopping == STOP:
        _leave(plan, "cancelled", "cancelled")
    elif not stopping:
        _leave(plan, "failed", "Snakemake ended with an error, see above")
        sys.exit(1)
    elif not watch.finished:
        _leave(plan, "failed", "no stage was finished in a whole allocation: submit with a longer --time")
        sys.exit(1)
    else:
        _leave(plan, "requeued", f"{watch.finished} stages finished; back into the queue for the rest")
        slurm.requeue(number)
        while not told:  # SLURM ends the job
            time.sleep(0.5)


def _margin(plan: Plan, seconds: float) -> float:
    margin = min(LONGEST_MARGIN, seconds / 10) if plan.margin is None else plan.margin
    return min(margin, seconds * 0.9)


def _wait(snakemake: subprocess.Popen[str], plan: Plan, end: float | None, margin: float) -> str:
    """Waits for Snakemake; says why it was stopped, if it was."""
    stopping = ""
    while snakemake.poll() is None:
        now = time.time()
        if not stopping and (plan.folder / STOP).exists():
            stopping = STOP
            snakemake.send_signal(signal.SIGINT)
        elif end and not stopping and now >= end - margin:
            stopping = "time"
            _say(f"the time is up in {_minutes(end - now)} minutes: nothing more is started")
            snakemake.send_signal(signal.SIGTERM)
        elif end and stopping == "time" and now >= end - min(LAST_SECONDS, margin / 2):
            _say("what still runs is stopped, to be made again")
            _stop(snakemake, plan.controller)
        time.sleep(0.5)
    return stopping


def _stop(snakemake: subprocess.Popen[str], controller: bool) -> None:
    """Ends what Snakemake waits for, and then itself where it does not end by that."""
    import psutil

    if controller:
        snakemake.send_signal(signal.SIGINT)  # it cancels its jobs
    else:
        for process in psutil.Process(snakemake.pid).children(recursive=True):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
    try:
        snakemake.wait(15)
    except subprocess.TimeoutExpired:
        snakemake.kill()
        snakemake.wait()


def _leave(plan: Plan, outcome: str, words: str) -> None:
    """Writes how this allocation ended, and says it."""
    files.write_json(
        plan.folder / OUTCOME, {"outcome": outcome, "allocations": _allocations(), "job": slurm.own_job(), "why": words}
    )
    _say(words)


def _allocations() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f}" if seconds >= 600 else f"{seconds / 60:.1f}"


def _say(words: str) -> None:
    print(f"rloo: {words}", flush=True)
