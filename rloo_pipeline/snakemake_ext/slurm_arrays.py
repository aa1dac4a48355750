"""Jobs of one rule as one array job of SLURM; each task runs what its own job would run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

LOG_NAME = "%A_%a.log"


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


def submit(executor: Any, command: str, jobs: Sequence[Any]) -> list[SubmittedJobInfo]:
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
