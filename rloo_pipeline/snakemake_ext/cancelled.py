"""A SLURM job that somebody has cancelled ends the run, once the other jobs are done.

Snakemake's SLURM plugin (2.8.0) has no setting for it: to it a cancelled job failed like any other, and is submitted
again. What it reports goes through here first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any


def ends_the_run(say: Callable[[str], None]) -> None:
    """Makes it so in this process, where it has loaded the plugin; `say` gets the line about it."""
    plugin = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is None:
        return
    report = plugin.Executor.report_job_error

    def report_job_error(self: Any, job_info: Any, msg: str | None = None, **more: Any) -> None:
        found = re.search(r"SLURM-job '(\S+)' failed, SLURM status is: 'CANCELLED", msg or "")
        if found:
            rule = job_info.job.rule
            rule.restart_times = 0
            say(f"SLURM job {found[1]} ({rule.name}) was cancelled, so the run ends; the same command goes on")
        report(self, job_info, msg=msg, **more)

    plugin.Executor.report_job_error = report_job_error
