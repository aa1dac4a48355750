"""Options of sbatch for a rule's jobs, from the SLURM plugin's own code, for a request before there are jobs."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from rloo_pipeline.errors import one_line
from rloo_pipeline.runtime import slurm_commands
from rloo_pipeline.runtime.import_shims import imported_later

LAST_OF_ALL = "rloo-doctor"
"""Comment of a job. The plugin writes what all jobs have, such as names of files, up to the comment."""


def evaluated(name: str, value: Any) -> Any:
    """The value of a resource in a job's first attempt, by Snakemake's rules: one in quotes loses them. An expression
    that Snakemake can evaluate only for a job stays.
    """
    from snakemake.exceptions import WorkflowError
    from snakemake.resources import Resource

    if isinstance(value, str):
        with suppress(WorkflowError):
            return Resource.cli_evaluator(name, value, wildcards=(), input=(), attempt=1, async_run=None)
    return value


def of_ranks(nodes: int, per_node: int, threads: int) -> dict[str, Any]:
    """Resources that rules request for ranks on several nodes, as in workflow/rules/common.smk."""
    tasks = {"tasks_per_node": per_node} if per_node > 1 else {"tasks": nodes}
    return {"nodes": nodes, **tasks, "cpus_per_task": threads, "tasks_per_gpu": 0, "mpi": "srun"}


def of_job(settings: Mapping[str, Any], resources: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The options with which the executor submits a job, without the number of CPUs if only the rule sets it; and the
    reason if it does not submit the job.

    Args:
        settings: the profile.
        resources: the job's resources.
    """
    from snakemake.exceptions import WorkflowError
    from snakemake.iocontainers import ResourceList

    with imported_later("pandas"):
        import snakemake_executor_plugin_slurm as plugin

    cpus = {} if "cpus_per_gpu" in resources else {"cpus_per_task": -1}  # -1: not asked for
    job = SimpleNamespace(resources=ResourceList(fromdict=cpus | dict(resources)), threads=1)
    account, partition = slurm_commands.account(resources), resources.get("slurm_partition")
    parameters = {
        "run_uuid": "",
        "slurm_logfile": "",
        "comment_str": LAST_OF_ALL,
        "workdir": "",
        "account": f"-A {shlex.quote(account)}" if account else "",
        "partition": f"-p {shlex.quote(str(partition))}" if partition else "",
    }
    of_executor = SimpleNamespace(
        **{name: settings.get(f"rloo-slurm-{name}") for name in ("qos", "reservation")}, requeue=False, no_requeue=False
    )
    try:
        plugin.validate_slurm_extra(job)
        command = plugin.get_submit_command(job, parameters, settings=of_executor) + plugin.set_gres_string(job)
        words = shlex.split(command)
    except WorkflowError as error:
        return (), one_line(error, 400)
    except ValueError as error:
        return (), f"slurm_extra is {resources.get('slurm_extra')}: {one_line(error)}"
    return tuple(words[words.index(LAST_OF_ALL) + 1 :]), ""
