"""Defines what a Snakemake process does besides running jobs: tables of steps, one per moment, taken in order.

workflow/rules/common.smk calls `install` once, which has `start` and `fail` called (`dag_messages.py`).
"""

from collections.abc import Callable, Iterable

from rloo_pipeline.snakemake_ext import (
    adoption,
    call_checks,
    early_stop,
    locks,
    logger,
    lost_metadata,
    node_exchange,
    planning,
    removal,
    run_folders,
    shared_cache,
    slurm_job_steps,
    steps,
)
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

Steps = Iterable[Callable[[SnakemakeCall], None]]

BEFORE_PLANNING: Steps = (
    planning.prepare,
    early_stop.prepare_interrupt,
    early_stop.end_with_first,
    early_stop.end_gracefully,
    logger.tell_displays,
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
    lost_metadata.settle_functions,
    adoption.check,
    run_folders.freeze,
    run_folders.write_configs,
    run_folders.mark_unfinished,
    run_folders.remove_lost_shards,
    early_stop.forget_earlier,
    node_exchange.refuse_jobs,
    steps.use_this_machine,
)
"""Steps before the first job. Dry runs, pictures of the DAG and finished runs have no jobs, so they write nothing."""

AFTER_FAILURE: Steps = (early_stop.show_experiment, early_stop.finish)
"""Steps after a job failed: a run that a gate has ended is finished with the rounds that it has."""


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
