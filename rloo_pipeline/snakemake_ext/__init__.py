"""All code that touches the internals of Snakemake or its plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import OF_FILES, UserError, explain

if TYPE_CHECKING:
    from rloo_pipeline.snakemake_ext.controller import Controller


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
    from snakemake.logging import logger

    from rloo_pipeline.snakemake_ext import dag_messages
    from rloo_pipeline.snakemake_ext.controller import Controller

    controller = Controller(workflow, runs)
    with _file_errors_explained():
        controller.prepare()
    if controller.main:
        hooks = partial(_start, controller), controller.fail
        logger.addFilter(partial(dag_messages.on_message, controller, hooks))
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


def _start(controller: Controller) -> None:
    """Prepares a run before its first job.

    Raises:
        WorkflowError: the run cannot work as configured.
    """
    from snakemake.exceptions import WorkflowError

    try:
        with _file_errors_explained():
            controller.start()
    except UserError as error:
        raise WorkflowError(str(error)) from None
