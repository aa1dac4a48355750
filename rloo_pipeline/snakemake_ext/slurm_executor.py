"""The SLURM plugin's executor, adapted to runs of many short rounds: `executor: rloo-slurm` in a profile.

Differences from snakemake-executor-plugin-slurm 2.8.0, and their reasons:

- **Polling.** The plugin waits 10 s longer after each answer in which no job ended, up to 180 s, so it notices the end
  of a one-minute stage up to half a minute late. Here the wait is a tenth of the time since a job last ended.
- **Job states.** The plugin treats a cancelled job as failed and submits it again. It waits silently and forever for a
  preempted job that SLURM does not requeue, a job that SLURM no longer lists, a held job, one that its partition, QOS
  or account does not allow, and `CANCELLED by 0`. With sacct, all tasks of an array get the state of the last one,
  because it queries JobIDRaw. Here `slurm_states` interprets states.
- **Arrays.** The plugin runs every task but the first in a Snakemake process that believes it is the first one's job.
  So a task that ends before the first one fails, log files have different names than those it prints, and jobs that are
  ready while others of their rule wait are never submitted (the plugin's issue 473). Here each task runs exactly what
  its own job would run.
- **SLURM's controller does not answer**, for example during a restart. The plugin counts that as a failed job and at
  once submits it again with the resources of its next attempt. Here the same job is submitted until SLURM accepts it.
  SLURM may accept a job without saying so ("Socket timed out"); such a job is cancelled before it is submitted again.
- **SLURM refuses a job.** The plugin submits it again with the resources of its next attempts, and prints sbatch's
  whole command each time. Here the run ends with SLURM's sentence. If the user has as many jobs in the queue as SLURM
  allows, the job is submitted again until SLURM takes it.
- **Accounts.** The plugin guesses one with sacct, which fails or names that of the last job. Here sbatch's own default
  applies, which is also SBATCH_ACCOUNT.
- **SLURM_CONF.** In a job, the plugin removes all variables of SLURM, and so the name of the cluster's configuration.
- **Ctrl-C.** The plugin cancels the jobs that it knows, but not those that it is just submitting. Here these are
  cancelled too.
- **Failed nodes** are not excluded from later submissions, since SLURM starts no job on a node that is down.

It overrides the methods that the executor interface provides for this (run_jobs, run_job, check_active_jobs, cancel),
run_array_jobs, get_account_arg, _report_job_submission_threadsafe and _report_job_error_threadsafe.
"""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import ChainMap, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import guard, slurm_commands
from rloo_pipeline.runtime.import_shims import imported_later
from rloo_pipeline.runtime.slurm_commands import NO_ANSWER, QUEUE_FULL
from rloo_pipeline.snakemake_ext import leftover_jobs
from rloo_pipeline.snakemake_ext.slurm_states import JobStates, Outcome, Verdict

with imported_later("pandas"):  # only a report of efficiency needs it, and it takes a fifth of Snakemake's start
    import snakemake_executor_plugin_slurm as plugin
    from snakemake_executor_plugin_slurm import job_status_query

LONGEST_WAIT = 60.0
"""Maximum seconds between polls."""
SHARE_OF_WAIT = 0.1
"""Wait between polls, as a share of the time since a job last ended."""
REMIND = 1800.0
"""Seconds between two messages that the queue is full."""
REFUSED = re.compile(r"(?:sbatch: (?:error|fatal): |: (?=The --\S+ option ))(.+?)(?:'\.)?$", re.MULTILINE)
"""A line of sbatch about a job that it refuses, or of the plugin about an option in `slurm_extra`."""
LOG_NAME = "%A_%a.log"
"""Log file name of an array task."""


class Executor(plugin.Executor):  # type: ignore[misc]
    """Submits a run's jobs to SLURM."""

    _shown_for: int | None = None
    """Seconds for which squeue shows a job that has ended; None until SLURM has been asked."""
    _next_try = 0.0
    """Time before which no waiting call is made."""
    _is_silent = False
    """True if SLURM did not answer when it was last asked."""
    _told_full = float("-inf")
    """Time at which a message last said that the queue is full."""

    def __init__(self, workflow: Any, logger: Any) -> None:
        """Raises WorkflowError without sbatch, or if the SLURM plugin is not the supported version."""
        if shutil.which("sbatch") is None:
            raise WorkflowError("no sbatch on the PATH: run this where SLURM's commands are installed")
        try:
            guard.require("snakemake-executor-plugin-slurm")
        except UserError as error:
            raise WorkflowError(str(error)) from None
        self._states = JobStates()
        self._submitting = Lock()
        """Held while a job is submitted; whoever holds it knows all jobs that SLURM accepted and named."""
        self._known: set[str] = set()
        """Ids of jobs and arrays that SLURM accepted and named."""
        self._waiting = ThreadPoolExecutor(1)
        """Makes calls that wait for SLURM, one at a time."""
        self._last_end = time.monotonic()
        for name in filter(slurm_commands.OF_SHELL.match, [*os.environ]):  # the plugin calls these commands too
            del os.environ[name]
        if "SLURM_JOB_ID" in os.environ:  # submitted jobs must not take this one's resources for theirs
            if account := os.environ.get("SLURM_JOB_ACCOUNT"):  # submitit does not pass SBATCH_ACCOUNT on
                os.environ.setdefault("SBATCH_ACCOUNT", account)
            for name in [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]:
                del os.environ[name]
        super().__init__(workflow, logger)  # starts the polling thread
        leftover_jobs.own_names.append(self.run_uuid)

    def run_jobs(self, jobs: list[Any]) -> None:
        """Submits jobs that are ready; jobs of rules in `array_jobs` are submitted as arrays. No job waits for later
        ones.
        """
        by_rule: dict[str, list[Any]] = defaultdict(list)
        for job in jobs:
            if not job.is_group() and ({job.rule.name, "all"} & self.array_jobs):
                by_rule[job.rule.name].append(job)
        ours = {id(job) for group in by_rule.values() for job in group}
        # called first, even without jobs, because it stores the event loop that later reports go to
        super().run_jobs([job for job in jobs if id(job) not in ours])
        for group in by_rule.values():
            if len(group) > 1:
                self._submit_array_jobs(group)
            else:
                self._submit_job(group[0])

    def run_job(self, job: Any) -> None:
        """Submits a job while no other thread submits one."""
        with self._submitting:
            super().run_job(job)

    def run_array_jobs(self, jobs: Sequence[Any]) -> None:
        """Submits jobs of one rule, those with the same resources as one array."""
        alike: dict[str, list[Any]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: tuple(job.wildcards)):
            try:
                alike[sbatch_command(self, job)].append(job)
            except Exception as error:
                self._submission_failed([job], error)
        for command, group in alike.items():
            for start in range(0, len(group), self.max_array_size):
                self._submit_array(command, group[start : start + self.max_array_size])

    def get_account_arg(self, job: Any) -> Iterator[str]:
        """Yields sbatch's option for the (first) account that the profile names; SLURM judges it."""
        account = slurm_commands.account(job.resources)
        yield f" -A {shlex.quote(account)}" if account else ""

    def _submit_array(self, command: str, jobs: Sequence[Any]) -> None:
        if len(jobs) == 1:
            self.run_job(jobs[0])
            return
        try:
            with self._submitting:
                for job_info in submit_array(self, command, jobs):
                    self._report_job_submission_threadsafe(job_info)
        except Exception as error:  # this runs in its own thread, where nobody else would see it
            half = len(jobs) // 2 if QUEUE_FULL.search(str(error)) else 0
            if half:  # an array with more tasks than the queue may have would wait forever
                self._submit_array(command, jobs[:half])
            if not self._submits_again(str(error), self._submit_array, command, jobs[half:]):
                self._submission_failed(jobs[half:], error)

    def _submission_failed(self, jobs: Iterable[Any], error: Exception) -> None:
        for job in jobs:
            self._report_job_error_threadsafe(SubmittedJobInfo(job), f"submission of {job.name} failed: {error}")

    def _report_job_submission_threadsafe(self, job_info: SubmittedJobInfo) -> None:
        """Reports a job that SLURM took, and remembers its number."""
        self._known.add(str(job_info.external_jobid).partition("_")[0])
        super()._report_job_submission_threadsafe(job_info)

    def _report_job_error_threadsafe(self, job_info: SubmittedJobInfo, msg: str) -> None:
        """Reports a job that could not be submitted; one that SLURM refuses ends the run. If SLURM's controller did not
        answer, or the queue is full, submits the job again instead.
        """
        if self._submits_again(msg, self.run_job, job_info.job):
            return
        if "uthentication" not in msg and (reasons := REFUSED.findall(msg)):  # munged may be starting again
            job_info.job.rule.restart_times = 0
            remedy = "set the resources of its rule in the profile (`mem_mb: 0` leaves out --mem)"
            msg = f"SLURM refuses the job: {' '.join(reasons)}; {remedy}. "
        super()._report_job_error_threadsafe(job_info, msg)

    def _submits_again(self, error: str, submit: Callable[..., None], *arguments: Any) -> bool:
        """If sbatch failed because the controller did not answer or the queue is full, waits, calls `submit` unless
        Snakemake has ended, and returns True.
        """
        if full := QUEUE_FULL.search(error):
            if time.monotonic() - self._told_full > REMIND:
                self._told_full = time.monotonic()
                self.logger.warning(
                    f"SLURM takes no more jobs of yours for now ({full[0]}), so they are submitted as others end; with "
                    "a lower `jobs` in the profile, other runs of yours get their share. If you have no other jobs in "
                    "the queue, the limit allows none: end this run and ask for another account or QOS."
                )
            self._later(submit, *arguments)
            return True
        if not NO_ANSWER.search(error):
            return False
        self.logger.warning("SLURM's controller did not answer sbatch; submitting again.")
        self._later(self._submit_again, submit, *arguments)
        return True

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in a submitting thread after a while, unless these threads have been told to end. They
        meanwhile submit other jobs, such as those of another account. Waiting calls take turns, so SLURM is not asked
        more often if there are many.
        """
        self._next_try = time.monotonic() + self.workflow.executor_settings.init_seconds_before_status_checks
        self._waiting.submit(self._call_when_due, function, *arguments)

    def _call_when_due(self, function: Callable[..., None], *arguments: Any) -> None:
        time.sleep(max(0.0, self._next_try - time.monotonic()))
        with suppress(RuntimeError, CancelledError):  # the submitting threads have been told to end
            self._job_submission_executor.submit(function, *arguments).result()

    def _submit_again(self, submit: Callable[..., None], *arguments: Any) -> None:
        """Cancels jobs that SLURM may have accepted without saying so, then submits them again."""
        try:
            with self._submitting:
                queue = slurm_commands.run("squeue", "-h", f"--name={self.run_uuid}", "--format=%F")
                if unnamed := sorted({*" ".join(queue).split()} - self._known):
                    self.logger.warning(f"SLURM took job {', '.join(unnamed)} without an answer; cancelling it.")
                    slurm_commands.run("scancel", *unnamed)
        except UserError:
            self._later(self._submit_again, submit, *arguments)
        else:
            submit(*arguments)

    def cancel(self) -> None:
        """Cancels the run's jobs, including those that a thread was just submitting when the user interrupted."""
        self._job_submission_executor.shutdown(wait=False, cancel_futures=True)
        super().cancel()  # waits for the submitting threads
        try:
            slurm_commands.run("scancel", f"--name={self.run_uuid}")
        except UserError as error:
            self.logger.warning(str(error))

    async def check_active_jobs(self, active_jobs: list[Any]) -> AsyncIterator[Any]:
        """Reports jobs that have ended and yields the others."""
        states, has_records = await self._ask() if active_jobs else (None, False)
        was_silent, self._is_silent = self._is_silent, bool(active_jobs) and states is None
        if self._is_silent and not was_silent:
            self.logger.warning("SLURM does not answer when asked for the states of the jobs; asking again.")
        now = time.monotonic()
        for job_info in active_jobs:
            verdict = Verdict(Outcome.ACTIVE)
            if states is not None:
                verdict = self._states.judge(job_info.external_jobid, states, now, has_records)
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

    async def _ask(self) -> tuple[dict[str, str] | None, bool]:
        """The states of the run's jobs, by job id; None if SLURM did not answer. And True unless jobs that have ended
        may be missing. sacct lags, and gives no reason why a job waits, so squeue is asked in any case, and is right.
        """
        name = f"--name={self.run_uuid}"
        commands = [["squeue", "--array", "--states=all", "--noheader", "--format=%i|%T %r", name]]
        if self._status_program() == "sacct":  # it may be down, or have no records
            start = f"--starttime={datetime.now() - timedelta(days=2):%Y-%m-%dT%H:00}"
            sacct = ["sacct", "-X", "--parsable2", "--noheader", "--format=JobID,State"]
            commands.insert(0, [*sacct, start, "--endtime=now", name])
        answers = list[dict[str, str] | None]()
        for command in commands:
            async with self.status_rate_limiter:
                answers.append(await asyncio.to_thread(self._states_by, command))
        given = [states for states in answers if states is not None]
        return dict(ChainMap(*reversed(given))) if given else None, answers[0] is not None

    def _states_by(self, command: Sequence[str]) -> dict[str, str] | None:
        """The states that a command prints, by job id; None if it fails or does not answer. The plugin's own function
        would leave a command that hangs behind.
        """
        try:
            lines = slurm_commands.run(*command)
        except UserError as error:
            self.logger.debug(str(error))
            return None
        return {job.strip(): state.strip() for job, mark, state in (line.partition("|") for line in lines) if mark}

    def _status_program(self) -> str:
        """squeue or sacct, as the profile says, but sacct if squeue does not show ended jobs for long enough."""
        program: str = self.get_status_command()
        if shutil.which("sacct") is None:
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
            with suppress(WorkflowError):  # it may have ended by now
                self.cancel_jobs([job_info])
        if verdict.outcome is not Outcome.FAILED:
            rule.restart_times = 0
            self.logger.error(message)
        self.report_job_error(job_info, msg=f"{message}. ", aux_logs=[str(log)] if log else [])


def sbatch_command(executor: Any, job: Any) -> str:
    """The plugin's command line that submits a job, without the command that the job runs."""
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
        WorkflowError: sbatch does not print exactly one job id.
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
        raise RuntimeError(f"sbatch refuses it: {sbatch.stderr.strip()}")
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
    """Lines of the batch script, with one command per task."""
    yield "#!/bin/sh"
    yield "case $SLURM_ARRAY_TASK_ID in"
    for task, command in enumerate(commands, 1):
        yield f"{task})"
        yield command
        yield ";;"
    yield "esac"
