"""Ends a call that would train finished rounds again only because the code of this package has changed."""

import os
from collections import Counter
from typing import Any

from snakemake.settings.enums import RerunTrigger

from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.snakemake_ext.dry_run import is_by_code, is_by_user
from rloo_pipeline.snakemake_ext.failures import RULES, stage_of
from rloo_pipeline.snakemake_ext.planning import jobs_that_follow
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

TRAINING = ("warmstart", "reward-model", "update")
"""Stages whose results nobody wants to lose by a `git pull`."""


def refuse_retraining(call: SnakemakeCall) -> None:
    """Ends the call unless the user has chosen between the finished files and this version of the package.

    Raises:
        UserError: finished training would run again, and all its reasons are that code has changed.
    """
    dag = call.workflow.dag
    jobs = list(dag.needrun_jobs())
    other_inputs = [job for job in jobs if _has_other_inputs(call, job)]
    first = [job for job in jobs if is_by_code(dag.reason(job)) and stage_of(job.rule)] + other_inputs
    # with `functions: take`, the user has chosen to run again what depends on edited functions
    if not first or (call.functions.edited and not call.functions.keeps):
        return
    by_user = {*jobs_that_follow(dag.depending, *(job for job in jobs if is_by_user(dag.reason(job))))}
    by_code = {*jobs_that_follow(dag.depending, *first)} - by_user
    again = [job for job in jobs if job in by_code and any(map(os.path.exists, job.output))]
    if not any(stage_of(job.rule) in TRAINING for job in again):
        return
    first = [job for job in first if job in by_code]
    names = Counter(RULES.get(job.rule.name, job.rule.name) for job in again)
    counts = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in names.items())
    keep = "" if other_inputs else "add --rerun-triggers mtime input to this and later calls, or "
    rules = " ".join(sorted({job.rule.name for job in first}))
    raise UserError(
        f"the code of this package has changed since {first[0].output[0]} was made, so "
        f"{counted(len(again), 'finished job')} would run again, training among them ({counts}): to keep what is "
        f"finished and make the rest with this version, {keep}accept it with `rloo adopt` and repeat the command; to "
        f"make all of it again, add --forcerun {rules}; or go back to the version that the run began with"
    )


def _has_other_inputs(call: SnakemakeCall, job: Any) -> bool:
    """True if training that the user wants to keep would run again, since the rule has other inputs than it had."""
    reason = call.workflow.dag.reason(job)
    keeps = reason.input_changed and not reason.forced and RerunTrigger.PARAMS not in call.workflow.rerun_triggers
    return bool(keeps) and stage_of(job.rule) in TRAINING
