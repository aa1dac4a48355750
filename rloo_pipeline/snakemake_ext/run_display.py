"""The display of the logger plugin: shows the jobs and runs of a Snakemake call, live on a terminal or as plain
lines.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rloo_pipeline.config import Config
from rloo_pipeline.report import live, live_run
from rloo_pipeline.report.live import MOST_RUNS
from rloo_pipeline.report.live_run import LiveRun
from rloo_pipeline.report.run_progress import Stage
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.snakemake_ext import dry_run, failures
from rloo_pipeline.snakemake_ext.failures import Failure
from rloo_pipeline.snakemake_ext.stage_lines import StageLines

STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
TOOK = re.compile(r"(took [\d.]+ s, [\d.]+ s of CPU,|rank \d+:) \d+ MB at most")
"""Pattern of the last line of each stage and rank, which is not shown: the table has the seconds of rounds, the report
those of jobs.
"""
MEASURED = ("/metrics.json", "/summary.json", "/held_out.json")
"""Files with a job's measurements of a policy or a round."""
MOST_JOBS = 6
"""Maximum number of running jobs that are named on a terminal."""
LINES_BESIDE_ROUNDS = 6
"""Number of terminal lines besides rounds and running jobs: the run, the table header, the bar, the last printed
line.
"""


class RunningJob(NamedTuple):
    """A job that Snakemake has started."""

    title: str
    began: float
    """Start of the job in seconds since 1970."""
    outputs: Sequence[str] = ()
    logs: Mapping[str, object] = MappingProxyType({})
    """`failures.version_of` its logs when it began."""


class RunDisplay:
    """Everything that is shown about one Snakemake call."""

    def __init__(self, stream: TextIO, *, dry_run: bool, color: bool, show_failed_logs: bool) -> None:
        """Takes the stream to show it on, and Snakemake's output options."""
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without UTF-8 has no character for an arrow
        # a duplicate descriptor, which stays the terminal while the output of jobs is redirected
        file = os.fdopen(os.dup(stream.fileno()), "w", buffering=1, errors="replace") if terminal else stream
        self._console = Terminal(file=file, force_terminal=terminal, no_color=not color or None, _environ=environment)
        self._is_dry_run = dry_run
        self.planned_jobs: list[Any] = []
        """Snakemake's jobs in a dry run."""
        self._show_failed_logs = show_failed_logs
        self._runs: list[tuple[Config, Path]] = []
        self._live_runs: list[LiveRun] = []
        self._logs: list[str] = []
        self._page: Path | None = None
        self._users: Mapping[str, str] = {}
        self._running: dict[int, RunningJob] = {}
        self._failures: dict[int, Failure] = {}
        self._exit_status: dict[str, int] = {}
        self._errors: set[str] = set()
        self._last_job: RunningJob | None = None
        self._done = self._total = 0
        self._began = time.time()
        self.interrupted = False
        """True once the user has interrupted the run. Errors of jobs are not shown after that."""
        self.stopping = False
        """True once SIGTERM has told Snakemake to start no more jobs."""
        self._closed = False
        self._live: Live | None = None
        self._stage_lines: StageLines | None = None
        self._lock = threading.RLock()

    @property
    def explains_failure(self) -> bool:
        """True if the last lines explain why the call failed."""
        return bool(self._failures) or self.interrupted or self.stopping

    def add_run(self, config: Config, run: Path, logs: list[str]) -> None:
        """Adds a run that Snakemake works on: its configuration, its folder, Snakemake's log files."""
        with self._lock:
            self._runs.append((config, run))
            self._logs = logs

    def add_experiment(self, page: Path, users: Mapping[str, str]) -> None:
        """Declares the runs an experiment, with its page and, for each folder of shared files, the runs that use
        them.
        """
        self._page, self._users = page, users

    def header(self) -> None:
        """Prints each run, and where its page will be."""
        log = os.path.relpath(self._logs[0]) if self._logs else None
        shown = self._runs if len(self._runs) <= MOST_RUNS else self._runs[:1]
        for config, run in shown:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="dim")
            grid.add_column(overflow="fold")
            for name, value in live_run.header(config, run, log):
                if self._console.is_terminal:
                    grid.add_row(name, value)
                else:
                    self._line(f"{name}: {value}")
            if self._console.is_terminal:
                self._console.print(grid)
        if len(shown) < len(self._runs):
            self._line(f"and {len(self._runs) - len(shown)} more runs in {self._runs[0][1].parents[1]}")

    def planned(self, total: int) -> None:
        """Starts the live display, once Snakemake knows the jobs."""
        self._total = total
        if self._is_dry_run or self._closed or self._live_runs:
            return
        self._live_runs = [LiveRun.of_call(config, run) for config, run in self._runs]
        if not self._console.is_terminal:
            return
        os.environ["COLUMNS"] = str(self._console.width)  # for jobs, which no longer see the terminal
        self._stage_lines = StageLines(self._stage_line)
        self._live = Live(
            get_renderable=self._frame, console=self._console, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def job(self, info: Any) -> None:
        """Records that a job begins. A job without outputs only groups the outputs of others.

        Args:
            info: Snakemake's event JOB_INFO.
        """
        if self._is_dry_run:
            return
        wildcards = {name: self._users.get(value, value) for name, value in (info.wildcards or {}).items()}
        title = failures.title(info.rule_name, wildcards)
        with self._lock:
            logs = {log: failures.version_of(log) for log in info.log}
            self._running[info.jobid] = RunningJob(title, time.time(), info.output, logs)
        if not self._live and info.output:
            self._line(f"begins: {title}" + (f" (log: {info.log[0]})" if info.log else ""))

    def finished(self, number: int) -> None:
        """Records that a job succeeded."""
        with self._lock:
            self._last_job = self._running.pop(number, None)
            self._failures.pop(number, None)

    def progress(self, done: int, total: int) -> None:
        """Shows the number of finished jobs, which Snakemake reports after each success."""
        self._done, self._total = done, total
        job, self._last_job = self._last_job, None
        if job is None:
            return
        if not self._live:
            seconds = f" ({time.time() - job.began:.0f} s)" if job.outputs else ""
            self._line(f"{done} of {total} jobs done: {job.title}{seconds}")
        measured = next((Path(file) for file in job.outputs if file.endswith(MEASURED)), None)
        with self._lock:  # the display is drawn in a thread
            for run in self._live_runs:
                if measured and measured.is_relative_to(run.run.folder):
                    self._measured(run, measured)

    def _measured(self, run: LiveRun, file: Path) -> None:
        """Reads a job's measurements of a round or a policy."""
        run.read()
        if file.name != "metrics.json" or self._live:
            return
        number, config = int(file.parent.name), run.run.config
        if number <= len(run.run.rounds):
            name = f"{config.run}: " if len(self._runs) > 1 else ""
            self._line(name + live_run.sentence(run.row(number), config.rounds, run.seconds_left()))

    def exit_status(self, log: str, status: int) -> None:
        """Records that the command with this log failed. The job's error follows."""
        self._exit_status[log] = status

    def failed(self, number: int, rule: str, logs: Sequence[str], reported: str | None) -> None:
        """Records that a job failed."""
        with self._lock:
            job = self._running.pop(number, None) or RunningJob(rule, 0.0)
        status = next((self._exit_status.pop(log) for log in logs if log in self._exit_status), 0)
        if self.interrupted or (self.stopping and status == 128 + signal.SIGTERM):  # the whole process group got it
            return
        message = failures.message_of(logs, reported, status, job.logs)
        self._failures[number] = Failure(job.title, message, logs)
        self._line(f"failed: {job.title}" + ("" if message in self._errors else f": {message}"), "red")
        self._errors.add(message)
        if self._show_failed_logs:
            for line in failures.ends_of(logs):
                self._line(line)

    def restarted(self, number: int) -> None:
        """Records that a failed job begins again."""
        self._failures.pop(number, None)

    def message(self, text: str, level: int = logging.INFO) -> None:
        """Shows another message of Snakemake."""
        if text and text != "None":
            self._line(text, STYLES.get(level))

    def give_terminal_back(self) -> None:
        """Releases the terminal for another process that continues the run. Failures are not shown again."""
        self._failures.clear()
        self._stop_live()
        self._closed = True

    def close(self) -> None:
        """Ends the display with the outcome of the call."""
        if self._closed:
            return
        self._stop_live()
        self._closed = True
        if self._is_dry_run:
            jobs = [job for job in self.planned_jobs if job.output]
            for line in dry_run.lines(jobs, [run for _, run in self._runs]):
                self._line(line)
        elif self.interrupted:
            self._line(f"Interrupted; {failures.go_on()}", "yellow")
        elif self._failures and self._console.is_terminal:
            self._console.print(failures.box(list(self._failures.values())))
        elif self._failures:
            for line in failures.block(list(self._failures.values())):
                self._line(line)
        elif self._total and self._done == self._total:
            pages = [self._page] if self._page else [run / "report.html" for _, run in self._runs]
            written = ", ".join(str(page) for page in pages if page.exists())
            self._line(f"finished in {live_run.clock(time.time() - self._began)}" + (f": {written}" if written else ""))
        elif self.stopping:
            self._line(f"Stopped before all jobs were done; {failures.go_on()}", "yellow")

    def _stop_live(self) -> None:
        if self._stage_lines:
            self._stage_lines.stop()
            self._stage_lines = None
            os.environ.pop("COLUMNS", None)
        if self._live:
            self._live.stop()
            self._live = None

    def _line(self, text: str, style: str | None = None) -> None:
        """Prints a line, above the live display if there is one."""
        if self._console.is_terminal:
            self._console.print(Text(text, style or "", overflow="fold"))
        else:
            print(text, file=self._console.file, flush=True)

    def _stage_line(self, text: str) -> None:
        """Prints a line from a stage, except its resource usage and errors that are already shown."""
        error = failures.ERROR.fullmatch(text)
        if TOOK.fullmatch(text) or (error and error["message"] in self._errors):
            return
        if error:
            self._errors.add(error["message"])
        self._line(text)

    def _frame(self) -> RenderableType:
        """Renders the current state of the live display."""
        with self._lock:
            running = list(self._running.values())
        lines = [f"{live_run.clock(time.time() - job.began)}  {job.title}" for job in running[:MOST_JOBS]]
        most = max(3, self._console.height - LINES_BESIDE_ROUNDS - len(lines))
        lines += [f"and {len(running) - MOST_JOBS} more jobs"] if len(running) > MOST_JOBS else []
        jobs = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        with self._lock:
            return live.frame(self._live_runs, [Stage("jobs", self._done, len(running), self._total)], jobs, most)
