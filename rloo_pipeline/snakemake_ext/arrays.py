"""Shards of a stage as one array job of SLURM, where the profile has `slurm-array-jobs`.

Snakemake's SLURM plugin (2.8.0) decides what can be an array; its own submission is replaced. There, all tasks but the
first are started by a Snakemake that takes itself for the first one's: a task that ends before the first fails for want
of the first one's file, log files have other names than those that are shown, and jobs that are handed over while
others wait are never submitted. Here each task runs what a job of its own would run, and a task that is tried again
with more memory or time is a job that asks for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo  # type: ignore[import-untyped]

FILE = "%A_%a.log"


def submit_whole_commands() -> None:
    """Makes it so in this process, where it has loaded the plugin."""
    plugin: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None:
        return
    os.environ.setdefault("SQUEUE_ARRAY", "1")  # else squeue has one line for all tasks that wait, and no ids
    plugin.pending_jobs_for_rule = lambda *_: 0  # for whose sake it would keep back, and lose, what it was given
    plugin.Executor.run_array_jobs = _run_array_jobs


def _run_array_jobs(self: Any, jobs: Sequence[Any]) -> None:
    """Submits jobs of one rule; those that ask for the same in one array."""
    alike: dict[str, list[Any]] = {}
    for job in sorted(jobs, key=lambda job: tuple(job.wildcards)):
        try:
            alike.setdefault(_sbatch(self, job), []).append(job)
        except Exception as error:
            _failed(self, [job], error)
    for command, group in alike.items():
        for start in range(0, len(group), self.max_array_size):
            chunk = group[start : start + self.max_array_size]
            try:
                if len(chunk) == 1:
                    self.run_job(chunk[0])
                else:
                    _submit(self, command, chunk)
            except Exception as error:  # in a thread, where nobody would see it
                _failed(self, chunk, error)


def _sbatch(self: Any, job: Any) -> str:
    """The command line that submits a job but for what it runs, as the plugin makes it."""
    plugin: Any = sys.modules["snakemake_executor_plugin_slurm"]
    plugin.validate_slurm_extra(job)
    asked = {
        "run_uuid": self.run_uuid,
        "slurm_logfile": self.slurm_logdir / f"rule_{job.name}" / FILE,
        "comment_str": f"rule_{job.name}",
        "account": next(self.get_account_arg(job)),
        "partition": self.get_partition_arg(job),
        "workdir": self.workflow.workdir_init,
    }
    settings, failed = self.workflow.executor_settings, self._failed_nodes
    command: str = plugin.get_submit_command(job, asked, settings=settings, failed_nodes=failed)
    return command + str(plugin.set_gres_string(job))


def _submit(self: Any, command: str, jobs: Sequence[Any]) -> None:
    folder = self.slurm_logdir / f"rule_{jobs[0].name}"
    folder.mkdir(parents=True, exist_ok=True)
    outcome = subprocess.run(
        f"{command} --array=1-{len(jobs)} /dev/stdin",
        shell=True,
        input="\n".join(_script(self.format_job_exec(job) for job in jobs)),
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode:
        raise RuntimeError(f"sbatch refuses it: {' '.join(outcome.stderr.split())}")
    number = outcome.stdout.strip().split(";")[0]
    ids = ", ".join(str(job.jobid) for job in jobs)
    self.logger.info(
        f"Jobs {ids} have been submitted as SLURM array {number}_[1-{len(jobs)}] (logs: {folder}/{number}_*.log)."
    )
    for task, job in enumerate(jobs, 1):
        aux = {"slurm_logfile": folder / f"{number}_{task}.log"}
        self._report_job_submission_threadsafe(SubmittedJobInfo(job, external_jobid=f"{number}_{task}", aux=aux))


def _script(commands: Iterator[str]) -> Iterator[str]:
    yield "#!/bin/sh"
    yield "case $SLURM_ARRAY_TASK_ID in"
    for task, command in enumerate(commands, 1):
        yield f"{task})"
        yield command
        yield ";;"
    yield "esac"


def _failed(self: Any, jobs: Sequence[Any], error: Exception) -> None:
    for job in jobs:
        self._report_job_error_threadsafe(SubmittedJobInfo(job), f"submission of {job.name} failed: {error}")
