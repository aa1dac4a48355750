"""Runs Snakemake in one SLURM job that continues after its time limit; `rloo submit` submits this job.

Some time before the limit (`Plan.margin`), Snakemake is told to start no more jobs. Running stages may finish until
shortly before the limit. Then they are stopped and run again later, since a stage writes its files completely or not at
all. The job is requeued under the same id and continues where it left off.

A job that SLURM itself requeues (preemption, node failure) continues in the same way. The job fails if a stage fails,
or if no stage finishes in a whole allocation, since none would finish in the next one either.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple, TypeVar

from rloo_pipeline.artifacts import files
from rloo_pipeline.cluster import slurm
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches

OUTCOME = "outcome.json"
STOP = "stop"
"""A file of this name in the outcome's folder tells a controller to cancel its jobs and exit."""
CANCELLED = "finished stages stay, and `rloo submit` continues from them"
"""The reason that is recorded for a job that `rloo cancel` ended."""
LONGEST_MARGIN = 1800.0
"""Maximum of the default margin, in seconds."""
LAST_SECONDS = 60.0
"""Seconds before the limit at which running stages are stopped."""
PATIENCE = 600.0
"""Seconds for which SLURM's controller may be unavailable, for example during a restart."""
Answer = TypeVar("Answer")


class Plan(NamedTuple):
    """Everything that the job needs to run."""

    snakemake_args: list[str]
    """Arguments of Snakemake."""
    project: Path
    """Working folder of Snakemake."""
    folder: Path
    """Folder for the outcome."""
    controller: bool
    """True if each stage is its own SLURM job."""
    margin: float | None
    """Seconds before the time limit in which no job is started. Default: a tenth of the allocation, at most half an
    hour.
    """


def _pass_on(lines: IO[str], finished: list[bool]) -> None:
    """Prints Snakemake's output, and adds each finished job to `finished`, True for the last one: a Snakemake process
    that is stopped exits with an error even then.
    """
    for line in lines:
        # a line of Snakemake itself, or of our logger plugin `rloo`
        if counts := re.match(r"(\d+) of (\d+) (?:steps \(|jobs done: )", line):
            finished.append(counts[1] == counts[2])
        _print(line)


def work(plan: Plan) -> None:
    """Runs Snakemake until the run is done, or requeues the job when its time limit is near.

    Exits with status 1 if a stage failed or SLURM ends the job.
    """
    number, shell = slurm.own_job() or "", os.getppid()
    terminations: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: terminations.append(1))
    (plan.folder / STOP).unlink(missing_ok=True)
    began, end = time.time(), _ask(slurm.end_of, number)
    margin = 0.0 if end is None else _margin(plan, end - began)
    _say(f"allocation {_allocations()} of job {number}" + (f", {_minutes(end - began)} minutes" if end else ""))
    snakemake = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *plan.snakemake_args],
        cwd=plan.project,
        env=caches.for_snakemake(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    finished = list[bool]()
    reader = Thread(target=_pass_on, args=(snakemake.stdout, finished), daemon=True)
    reader.start()
    stopping = _wait(snakemake, plan, end, margin, shell)
    reader.join(10)
    done = snakemake.returncode == 0 or finished[-1:] == [True]
    # SLURM is ending the job and kills this process or, without cgroups, only its shell
    if (terminations or os.getppid() != shell) and not done:
        deadline = time.monotonic() + 300
        while os.getppid() == shell and time.monotonic() < deadline:
            time.sleep(0.5)
        sys.exit(1)
    if done:
        _leave(plan, "done", "the run is done")
    elif stopping == STOP:
        _leave(plan, "cancelled", CANCELLED)
    elif not stopping:
        _leave(plan, "failed", "Snakemake ended with an error, see above")
        sys.exit(1)
    elif not finished:
        _leave(plan, "failed", "no stage was finished in a whole allocation: submit with a longer --time")
        sys.exit(1)
    else:
        _leave(plan, "requeued", f"{len(finished)} stages finished; the job is requeued for the rest")
        _ask(slurm.requeue, number)
        while not terminations:  # SLURM ends the job
            time.sleep(0.5)


def _ask(question: Callable[[str], Answer], number: str) -> Answer:
    """Repeats a SLURM query or request for this job until SLURM answers.

    Raises:
        UserError: SLURM refuses, or has not answered for PATIENCE.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return question(number)
        except UserError as error:
            if time.monotonic() > deadline:
                raise
            _say(f"{error}; asking again")
        time.sleep(10)


def _margin(plan: Plan, seconds: float) -> float:
    margin = min(LONGEST_MARGIN, seconds / 10) if plan.margin is None else plan.margin
    return min(margin, seconds * 0.9)


def _wait(snakemake: subprocess.Popen[str], plan: Plan, end: float | None, margin: float, shell: int) -> str:
    """Waits for Snakemake. Returns why it was stopped: STOP, `time`, or an empty string if it was not."""
    stopping = ""
    while snakemake.poll() is None:
        now = time.time()
        if os.getppid() != shell:  # SLURM has ended the job, and may already start it again
            snakemake.kill()
        if not stopping and (plan.folder / STOP).exists():
            stopping = STOP
            snakemake.send_signal(signal.SIGINT)
        elif end and not stopping and now >= end - margin:
            stopping = "time"
            _say(f"{_minutes(end - now)} minutes until the time limit: no more stages are started")
            snakemake.send_signal(signal.SIGTERM)
        elif end and stopping == "time" and now >= end - min(LAST_SECONDS, margin / 2):
            _say("the running stages are stopped and will run again")
            _stop(snakemake, plan.controller)
        time.sleep(0.5)
    return stopping


def _stop(snakemake: subprocess.Popen[str], controller: bool) -> None:
    """Ends Snakemake's jobs, then Snakemake itself if it is still running."""
    import psutil

    if controller:
        snakemake.send_signal(signal.SIGINT)  # on this signal it cancels its SLURM jobs
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


def _leave(plan: Plan, outcome: str, reason: str) -> None:
    """Records and prints how this allocation ended."""
    record(plan.folder, outcome, _allocations(), slurm.own_job(), reason)
    _say(reason)


def record(folder: Path, outcome: str, allocations: int, job: str | None, reason: str) -> None:
    """Writes how a job ended into its folder."""
    files.write_json(folder / OUTCOME, {"outcome": outcome, "allocations": allocations, "job": job, "why": reason})


def _allocations() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f}" if seconds >= 600 else f"{seconds / 60:.1f}"


def _say(message: str) -> None:
    _print(f"rloo: {message}\n")


def _print(text: str) -> None:
    """Writes to the job's log. On a full disk the text is lost, but Snakemake must not wait for a reader forever."""
    with suppress(OSError):
        print(text, end="", flush=True)
