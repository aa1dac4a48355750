"""The step in which a job's stage runs: keeps SLURM_CONF, and puts a preempted job back into the queue.

The SLURM plugin's executor inside a job calls srun without SLURM's variables. Where a module sets SLURM_CONF, srun then
finds no cluster, and each job fails.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from rloo_pipeline.cluster import slurm
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext.replacing import replaces
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

MOST_RESTARTS = 5
"""Restarts after which a preempted job counts as failed: something other than SLURM may end its stage each time."""


def keep_slurm_conf(_: SnakemakeCall) -> None:
    """Has the plugin's executor inside a job call srun with this process's SLURM_CONF."""
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm_jobstep")
    if executor is None or "SLURM_CONF" not in os.environ:
        return
    popen: Any = subprocess.Popen
    kept = {"SLURM_CONF": os.environ["SLURM_CONF"]}

    def start(*command: Any, env: Any = None, **options: Any) -> Any:
        return popen(*command, env=None if env is None else env | kept, **options)

    executor.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start})


def requeue_preempted(call: SnakemakeCall) -> None:
    """Puts a job back into the queue if its stage ends by SIGTERM before SLURM preempts the job (GraceTime). Otherwise
    the job would count as failed and, after some preemptions, end the run.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    if call.main or slurm.own_job() is None:
        return

    @replaces(JobScheduler, "schedule")
    def schedule_or_requeue(schedule: Any, scheduler: Any) -> Any:
        succeeded = schedule(scheduler)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        if not succeeded and restarts < MOST_RESTARTS:
            with suppress(UserError):  # SLURM may not allow it
                # the ranks of an update on several nodes are steps of their own, which end instead of this process
                if scheduler._user_kill or slurm.preempting(_own_name()):
                    _requeue()
        return succeeded


def _requeue() -> None:
    """Puts this process's job back into the queue and waits until SLURM ends it, unless SLURM is ending it anyway, as
    after scancel or at its time limit.

    Raises:
        UserError: SLURM refuses, or does not answer.
    """
    job = slurm.job(os.environ["SLURM_JOB_ID"])
    if job is not None and job.state == "RUNNING":
        slurm.requeue(_own_name())
        time.sleep(60)


def _own_name() -> str:
    """This process's job, or task of an array: the number of one task is that of the whole array."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return os.environ["SLURM_JOB_ID"] if task is None else f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
