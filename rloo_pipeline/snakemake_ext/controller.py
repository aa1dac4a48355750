"""Defines what a Snakemake process does besides running jobs: tables of steps, one per moment, taken in order.

workflow/rules/common.smk calls `install` once. A filter of Snakemake's messages tells the moments that have no hook.
"""

import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import OF_FILES, UserError, explain, no_space_left
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.snakemake_ext import (
    adoption,
    call_checks,
    early_stop,
    leftover_jobs,
    locks,
    lost_metadata,
    node_exchange,
    planning,
    rebuilt_image,
    removal,
    run_folders,
    shared_cache,
    slurm_job_steps,
    steps,
    updated_package,
)
from rloo_pipeline.snakemake_ext.logger import tell_displays
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

Steps = Iterable[Callable[[SnakemakeCall], None]]

BEFORE_PLANNING: Steps = (
    planning.prepare,
    early_stop.prepare_interrupt,
    early_stop.end_with_first,
    early_stop.end_gracefully,
    tell_displays,
    shared_cache.make_safe,
    removal.rename_first,
    call_checks.require_packages,
    call_checks.warn_in_dry_run,
    slurm_job_steps.keep_slurm_conf,
    slurm_job_steps.requeue_preempted,
    locks.hold_run,
)
"""Steps while the Snakefile is read, in all processes."""

RULES_READ: Steps = (
    call_checks.refuse_unknown_rules,
    shared_cache.refuse_unpinned,
    planning.note_parameters,
    steps.place,
)
"""Steps after all rules are read, in all processes."""

BEFORE_RUNNING: Steps = (
    call_checks.refuse_executor,
    locks.refuse_second_process,
    early_stop.prepare_end,
    call_checks.require_inputs,
    early_stop.refuse_fewer_rounds,
    lost_metadata.refuse_kept,
    adoption.refuse_copy,
    lost_metadata.ask_about_functions,
    updated_package.refuse_retraining,
    early_stop.refuse_earlier,
    lost_metadata.settle_functions,
    adoption.check,
    run_folders.freeze,
    run_folders.write_configs,
    rebuilt_image.note,
    run_folders.mark_unfinished,
    run_folders.remove_lost_shards,
    early_stop.forget_earlier,
    node_exchange.refuse_jobs,
    leftover_jobs.cancel,
    steps.use_this_machine,
)
"""Steps before the first job. Dry runs, pictures of the DAG and finished runs have no jobs, so they write nothing."""

AFTER_FAILURE: Steps = (early_stop.show_experiment, early_stop.finish)
"""Steps after a job failed: a run that a gate has ended is finished with the rounds that it has."""

PROTECTED = re.compile(r"ProtectedOutputException .*?\n    affected files:\n +(\S[^\n]*)", re.DOTALL)
"""Pattern of Snakemake's message about files of a job to run that this process cannot write, with the first of them."""
NOT_WRITTEN = re.compile(
    rf"Traceback .*\nOSError: \[Errno ({errno.ENOSPC}|{errno.EDQUOT}|{errno.EROFS})\] [^\n:]*"
    r"(?:: (['\"])([^\n]+?)\2(?: -> [^\n]*)?)?\n*",
    re.DOTALL,
)
"""Pattern of the traceback with which Snakemake ends if it cannot write its own files, with the file if it is named."""


class Controller(SnakemakeCall):
    """A Snakemake call that takes the steps. Steps raise UserError if the run cannot work as configured."""

    def prepare(self) -> None:
        """Takes the steps before Snakemake plans."""
        self._take(BEFORE_PLANNING)

    def rules_read(self) -> None:
        """Takes the steps after all rules are read."""
        self._take(RULES_READ)

    def start(self) -> None:
        """Takes the steps before the first job, in the main process."""
        self.waits.close()
        self.planned = True
        self._take(BEFORE_RUNNING)

    def fail(self) -> None:
        """Takes the steps after a job failed.

        Raises:
            SystemExit: with 0, if a run that a gate has ended was finished.
        """
        self._take(AFTER_FAILURE)

    def _take(self, moment: Steps) -> None:
        for step in moment:
            step(self)

    def on_message(self, record: logging.LogRecord) -> bool:
        """Filters a message. Runs in the thread that logs.

        Before the DAG is built, turns on `--rerun-incomplete`, guards Snakemake's records, and has the steps taken
        before the Snakefile's own `onstart` and `onerror`; Snakemake would not call those of a module. If the folder
        is locked, names the owner instead of advising to unlock it. If a job's file cannot be written, says what
        helps. If no job is left to run, looks for files that were made with another configuration.

        Args:
            record: the message.

        Raises:
            WorkflowError: no job is left to run, although a file does not match the configuration or cannot be read.
        """
        message = str(record.msg)
        if message.startswith("Building DAG"):
            self.workflow.dag_settings.force_incomplete = True
            lost_metadata.ignore_damaged_records(self.workflow.persistence)
            adoption.take_all(self)
            start, fail = partial(_start, self), self.fail
            onstart, onerror = self.workflow._onstart, self.workflow._onerror
            self.workflow._onstart = lambda log: (start(), onstart(log))
            self.workflow._onerror = lambda log: (fail(), onerror(log))
            self.waits.enter_context(announcing("Snakemake is building the DAG", logger.info))
        if "Directory cannot be locked" in message and self.owner:
            record.msg = f"Error: {self.owner}"
        if sentence := _unwritable(message):
            record.msg = f"Error: {sentence}"
        if message.startswith("Nothing to be done"):
            with _refusals_of_snakemake():
                kept = lost_metadata.kept(self) or lost_metadata.missing(self)
                if kept and not self.workflow.dryrun:
                    raise UserError(kept)
                if said := kept or lost_metadata.missing_tables(self):
                    logger.warning(said)
        return True


def install(workflow: Any, runs: RunSet) -> tuple[RunSet, Controller]:
    """Prepares a Snakemake process for a run, or for the runs of an experiment.

    Args:
        workflow: Snakemake's `workflow` object, as seen in a Snakefile.
        runs: runs to work on.

    Returns:
        The runs and the process's controller. In an experiment, runs that a gate has ended have only the rounds up to
        there.

    Raises:
        UserError: something that the run needs is missing.
    """
    controller = Controller(workflow, runs)
    with _file_errors_explained():
        controller.prepare()
    if controller.main:
        logger.addFilter(controller.on_message)
    return controller.runs, controller


@contextmanager
def _file_errors_explained() -> Iterator[None]:
    """Turns a write error, for example if results/ is read-only, and a package that the light controller lacks into one
    sentence.
    """
    # otherwise each line that does not fit into Snakemake's log on a full disk is a traceback, now and in the whole run
    logging.raiseExceptions = False
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(explain(error)) from None
    except OSError as error:
        if error.errno not in OF_FILES:
            raise
        error.filename = error.filename or str(Path.cwd())
        raise UserError(explain(error)) from None


@contextmanager
def _refusals_of_snakemake() -> Iterator[None]:
    """Turns a UserError into the error that Snakemake shows as one sentence, and explains errors of files."""
    try:
        with _file_errors_explained():
            yield
    except UserError as error:
        raise WorkflowError(str(error)) from None


def _unwritable(message: str) -> str | None:
    """One sentence for Snakemake's message about a file that it cannot write; None for any other message."""
    if failed := NOT_WRITTEN.fullmatch(message):
        folder = Path(failed[3]).parent if failed[3] else Path.cwd()
        if int(failed[1]) == errno.EROFS:
            return explain(OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder)))
        return no_space_left(folder)
    protected = PROTECTED.match(message)
    helps = "make it writable, and repeat the command, or continue a copy (`rloo adopt`)"
    return protected and f"{protected[1]}: you cannot write to it, or its file system is read-only; {helps}"


def _start(controller: Controller) -> None:
    """Prepares a run before its first job.

    Raises:
        WorkflowError: the run cannot work as configured.
    """
    with _refusals_of_snakemake():
        controller.start()
