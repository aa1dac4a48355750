"""Keeps SLURM_CONF for the step in which a job's stage runs.

The SLURM plugin's executor inside a job calls srun without SLURM's variables. Where a module sets SLURM_CONF, srun then
finds no cluster, and each job fails.
"""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


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
