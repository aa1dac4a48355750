"""The SLURM plugin's executor with what a run of many short rounds needs: `executor: rloo-slurm` in a profile.

What differs from snakemake-executor-plugin-slurm 2.8.0, and why:

- **Asking for states.** The plugin waits 10 s longer after each answer in which no job ended, up to 180 s, so a stage
  of a minute is seen to be done up to half a minute late. Here the wait is a tenth of the time since a job last ended.
- **What a state means.** To the plugin a cancelled job is a failed one and is submitted again. Without end and without
  a word it waits for a preempted job that SLURM does not put back, a job that SLURM no longer lists, a held one, one
  that its partition, QOS or account does not allow, and `CANCELLED by 0`. With sacct, the tasks of an array all have
  the state of the last one, since it asks for JobIDRaw. `slurm_states` says what they mean here.
- **Arrays.** The plugin has every task but the first started by a Snakemake that takes itself for the first one's job,
  so a task that ends before the first one fails, log files have other names than those it prints, and jobs that are
  ready while others of their rule wait are never submitted (the plugin's issue 473). Here each task runs what its own
  job would run.
- **SLURM's controller does not answer**, as while it is restarted. The plugin counts that as a failed job, which is
  submitted again at once, with the resources of its next attempt. Here the same job is submitted until it is taken.
  SLURM may take a job and not say so ("Socket timed out"); such a job is cancelled before it is submitted again.
- **Ctrl-C** cancels the jobs that the plugin knows, but not those that it is submitting at that moment.
- **Nodes that failed** are not left out of later submissions: SLURM starts no job on a node that is down.

Overridden are the methods that the executor interface provides for it (run_jobs, run_job, check_active_jobs, cancel),
run_array_jobs, _report_job_submission_threadsafe and _report_job_error_threadsafe.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm import job_status_query
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard
from rloo_pipeline.snakemake_ext.slurm_states import JobStates, Outcome, Verdict

LONGEST_WAIT = 60.0
"""Seconds between two questions at most."""
SHARE_OF_WAIT = 0.1
"""The wait, as a share of the time since a job last ended."""
NO_ANSWER = re.compile("Unable to contact slurm controller|Socket timed out")
"""Errors of sbatch while SLURM's controller is restarted or overloaded."""
LOG_NAME = "%A_%a.log"
"""Name of the log of a task of an array."""


class Executor(plugin.Executor):  # type: ignore[misc]
    """Submits a run's jobs to SLURM."""

    _shown_for: int | None = None
    """Seconds for which squeue shows a job that has ended; None until SLURM has said."""

    def __init__(self, workflow: Any, logger: Any) -> None:
        """Raises: WorkflowError, where the SLURM plugin is not the one that this was made for."""
        try:
            guard.require("snakemake-executor-plugin-slurm")
        except UserError as error:
            raise WorkflowError(str(error)) from None
        self._states = JobStates()
        self._submitting = Lock()
        """Held while a job is submitted, so that without it all jobs that SLURM took and named are known."""
        self._known: set[str] = set()
        """Numbers of jobs and arrays that SLURM took and named."""
        self._last_end = time.monotonic()
        super().__init__(workflow, logger)  # starts the thread that asks for states

    def run_jobs(self, jobs: list[Any]) -> None:
        """Submits jobs that are ready, those of a rule of `array_jobs` as arrays. It holds none back for later ones."""
        by_rule: dict[str, list[Any]] = defaultdict(list)
        for job in jobs:
            if not job.is_group() and ({job.rule.name, "all"} & self.array_jobs):
                by_rule[job.rule.name].append(job)
        ours = {id(job) for group in by_rule.values() for job in group}
        # first, also without a job: it notes the event loop that later reports go to
        super().run_jobs([job for job in jobs if id(job) not in ours])
        for group in by_rule.values():
            if len(group) > 1:
                self._submit_array_jobs(group)
            else:
                self._submit_job(group[0])

    def run_job(self, job: Any) -> None:
        """Submits one job, while no other thread submits any."""
        with self._submitting:
            super().run_job(job)

    def run_array_jobs(self, jobs: Sequence[Any]) -> None:
        """Submits jobs of one rule; those that ask for the same resources as one array."""
        alike: dict[str, list[Any]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: tuple(job.wildcards)):
            try:
                alike[sbatch_command(self, job)].append(job)
            except Exception as error:
                self._submission_failed([job], error)
        for command, group in alike.items():
            for start in range(0, len(group), self.max_array_size):
                self._submit_array(command, group[start : start + self.max_array_size])

    def _submit_array(self, command: str, jobs: Sequence[Any]) -> None:
        if len(jobs) == 1:
            self.run_job(jobs[0])
            return
        try:
            with self._submitting:
                for job_info in submit_array(self, command, jobs):
                    self._report_job_submission_threadsafe(job_info)
        except Exception as error:  # this is a thread of its own, in which nobody else would see it
            if not self._submits_again(str(error), self._submit_array, command, jobs):
                self._submission_failed(jobs, error)

    def _submission_failed(self, jobs: Iterable[Any], error: Exception) -> None:
        for job in jobs:
            self._report_job_error_threadsafe(SubmittedJobInfo(job), f"submission of {job.name} failed: {error}")

    def _report_job_submission_threadsafe(self, job_info: SubmittedJobInfo) -> None:
        """Reports a job that SLURM took, and remembers its number."""
        self._known.add(str(job_info.external_jobid).partition("_")[0])
        super()._report_job_submission_threadsafe(job_info)

    def _report_job_error_threadsafe(self, job_info: SubmittedJobInfo, msg: str) -> None:
        """Reports a job that could not be submitted. If SLURM's controller did not answer, submits it again instead."""
        if not self._submits_again(msg, self.run_job, job_info.job):
            super()._report_job_error_threadsafe(job_info, msg)

    def _submits_again(self, error: str, submit: Callable[..., None], *arguments: Any) -> bool:
        """True if this is why sbatch failed; then calls `submit` after a while, unless Snakemake ends meanwhile."""
        if not NO_ANSWER.search(error):
            return False
        self.logger.warning("SLURM's controller did not answer sbatch; submitting again.")
        self._later(self._submit_again, submit, *arguments)
        return True

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in a thread that submits jobs, after a while, unless these have been told to end."""
        time.sleep(self.workflow.executor_settings.init_seconds_before_status_checks)
        with suppress(RuntimeError):
            self._job_submission_executor.submit(function, *arguments)

    def _submit_again(self, submit: Callable[..., None], *arguments: Any) -> None:
        """Submits what SLURM may have taken without saying so, after it has cancelled that."""
        with self._submitting:
            queue = subprocess.run(
                ["squeue", "-h", f"--name={self.run_uuid}", "--format=%F"], capture_output=True, text=True, check=False
            )
            if unnamed := sorted({*queue.stdout.split()} - self._known):
                self.logger.warning(f"SLURM took job {', '.join(unnamed)} without an answer; cancelling it.")
                subprocess.run(["scancel", *unnamed], check=False)
        if queue.returncode:
            self._later(self._submit_again, submit, *arguments)
        else:
            submit(*arguments)

    def cancel(self) -> None:
        """Cancels the run's jobs, also those that a thread was submitting while the user interrupted it."""
        self._job_submission_executor.shutdown(wait=False, cancel_futures=True)
        super().cancel()  # waits for these threads
        subprocess.run(["scancel", f"--name={self.run_uuid}"], check=False)

    async def check_active_jobs(self, active_jobs: list[Any]) -> AsyncIterator[Any]:
        """Reports jobs that have ended and yields the others."""
        states = await self._ask() if active_jobs else None
        if active_jobs and states is None:
            self.logger.warning("SLURM did not report the states of the jobs; asking again.")
        now = time.monotonic()
        for job_info in active_jobs:
            verdict = (
                Verdict(Outcome.ACTIVE) if states is None else self._states.judge(job_info.external_jobid, states, now)
            )
            if verdict.outcome is Outcome.ACTIVE:
                if verdict.message:
                    rule = job_info.job.rule.name
                    self.logger.warning(f"SLURM job {job_info.external_jobid} ({rule}) {verdict.message}")
                yield job_info
            else:
                self._last_end = now
                self._report(job_info, verdict)
        if not active_jobs:
            self._last_end = now
        shortest = self.workflow.executor_settings.init_seconds_before_status_checks
        wait = SHARE_OF_WAIT * (now - self._last_end)
        self.next_seconds_between_status_checks = max(shortest, min(LONGEST_WAIT, wait))

    async def _ask(self) -> dict[str, str] | None:
        """The states of the run's jobs, by number; None where SLURM did not answer."""
        name = f"--name {self.run_uuid}"
        if self._status_program() == "sacct":
            start = f"{datetime.now() - timedelta(days=2):%Y-%m-%dT%H:00}"
            command = f"sacct -X --parsable2 --noheader --format=JobID,State --starttime {start} --endtime now {name}"
        else:
            command = f"squeue --array --states=all --noheader --format='%i|%T %r' {name}"
        async with self.status_rate_limiter:
            states, _ = await job_status_query.query_job_status(command, self.logger)
        return states  # type: ignore[no-any-return]

    def _status_program(self) -> str:
        """squeue or sacct, as the profile says, as far as it will do: squeue must show an ended job for long enough."""
        program: str = self.get_status_command()
        if not job_status_query.is_query_tool_available("sacct"):
            return "squeue"
        if program == "squeue" and self._shown_for is None:
            self._shown_for = job_status_query.get_min_job_age()
        enough = 3 * max(self.workflow.executor_settings.init_seconds_before_status_checks, LONGEST_WAIT)
        return "squeue" if self._shown_for is not None and self._shown_for >= enough else "sacct"

    def _report(self, job_info: Any, verdict: Verdict) -> None:
        log = job_info.aux.get("slurm_logfile")
        if verdict.outcome is Outcome.SUCCEEDED:
            self.report_job_success(job_info)
            if log is not None and not self.workflow.executor_settings.keep_successful_logs:
                log.unlink(missing_ok=True)
            return
        rule = job_info.job.rule
        message = f"SLURM job {job_info.external_jobid} ({rule.name}) {verdict.message}"
        if verdict.outcome is Outcome.NEVER:
            with suppress(WorkflowError):  # it may have ended meanwhile
                self.cancel_jobs([job_info])
        if verdict.outcome is not Outcome.FAILED:
            rule.restart_times = 0
            self.logger.error(message)
        self.report_job_error(job_info, msg=f"{message}. ", aux_logs=[str(log)] if log else [])


def sbatch_command(executor: Any, job: Any) -> str:
    """The command line that submits a job, as the plugin makes it, without what the job runs."""
    plugin.validate_slurm_extra(job)
    parameters = {
        "run_uuid": executor.run_uuid,
        "slurm_logfile": executor.slurm_logdir / f"rule_{job.name}" / LOG_NAME,
        "comment_str": f"rule_{job.name}",
        "account": next(executor.get_account_arg(job)),
        "partition": executor.get_partition_arg(job),
        "workdir": executor.workflow.workdir_init,
    }
    settings, failed_nodes = executor.workflow.executor_settings, executor._failed_nodes
    command: str = plugin.get_submit_command(job, parameters, settings=settings, failed_nodes=failed_nodes)
    return command + str(plugin.set_gres_string(job))


def submit_array(executor: Any, command: str, jobs: Sequence[Any]) -> list[SubmittedJobInfo]:
    """Submits jobs as the tasks 1, 2, … of one array.

    Raises:
        RuntimeError: sbatch refuses the array.
        WorkflowError: it prints no number of a job, or several.
    """
    folder = executor.slurm_logdir / f"rule_{jobs[0].name}"
    folder.mkdir(parents=True, exist_ok=True)
    sbatch = subprocess.run(
        f"{command} --array=1-{len(jobs)} /dev/stdin",
        shell=True,
        input="\n".join(script(executor.format_job_exec(job) for job in jobs)),
        capture_output=True,
        text=True,
        check=False,
    )
    if sbatch.returncode:
        raise RuntimeError(f"sbatch refuses it: {' '.join(sbatch.stderr.split())}")
    array = plugin.validate_or_get_slurm_job_id(sbatch.stdout.strip().split(";")[0], sbatch.stdout)
    numbers = ", ".join(str(job.jobid) for job in jobs)
    executor.logger.info(
        f"Jobs {numbers} have been submitted as SLURM array {array}_[1-{len(jobs)}] (logs: {folder}/{array}_*.log)."
    )
    return [
        SubmittedJobInfo(job, external_jobid=f"{array}_{task}", aux={"slurm_logfile": folder / f"{array}_{task}.log"})
        for task, job in enumerate(jobs, 1)
    ]


def script(commands: Iterable[str]) -> Iterator[str]:
    """Lines of the batch script: one command for each task."""
    yield "#!/bin/sh"
    yield "case $SLURM_ARRAY_TASK_ID in"
    for task, command in enumerate(commands, 1):
        yield f"{task})"
        yield command
        yield ";;"
    yield "esac"
