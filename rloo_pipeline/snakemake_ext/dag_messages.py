"""Filters Snakemake's messages, since some of them mark moments for which there is no hook."""

import logging
from collections.abc import Callable

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.snakemake_ext import adoption, lost_metadata
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

Hooks = tuple[Callable[[], None], Callable[[], None]]


def on_message(call: SnakemakeCall, hooks: Hooks, record: logging.LogRecord) -> bool:
    """Filters a message. Runs in the thread that logs.

    Before the DAG is built, turns on `--rerun-incomplete`, guards Snakemake's records, and has the hooks called before
    the Snakefile's own `onstart` and `onerror`; Snakemake would not call those of a module. If the folder is locked,
    names the owner instead of advising to unlock it. If no job is left to run, looks for files that were made with
    another configuration.

    Args:
        call: this process.
        hooks: called before the first job, and after a job failed.
        record: the message.

    Raises:
        WorkflowError: no job is left to run, although a file does not match the configuration.
    """
    message = str(record.msg)
    if message.startswith("Building DAG"):
        call.workflow.dag_settings.force_incomplete = True
        lost_metadata.ignore_damaged_records(call.workflow.persistence)
        adoption.take_all(call)
        (start, fail), onstart, onerror = hooks, call.workflow._onstart, call.workflow._onerror
        call.workflow._onstart = lambda log: (start(), onstart(log))
        call.workflow._onerror = lambda log: (fail(), onerror(log))
        call.waits.enter_context(announcing("Snakemake is building the DAG", logger.info))
    if "Directory cannot be locked" in message and call.owner:
        record.msg = f"Error: {call.owner}"
    if message.startswith("Nothing to be done"):
        kept = lost_metadata.kept(call) or lost_metadata.missing(call)
        if kept and not call.workflow.dryrun:
            raise WorkflowError(kept)
        if kept:
            logger.warning(kept)
    return True
