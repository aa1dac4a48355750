"""Every line that touches the insides of Snakemake or of one of its plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import OF_FILES, UserError, explain

if TYPE_CHECKING:
    from rloo_pipeline.snakemake_ext.controller import Controller


_controllers: list[Controller] = []


def install(workflow: Any, runs: RunSet) -> tuple[RunSet, Controller]:
    """Prepares a Snakemake process for a run, or for those of an experiment.

    Args:
        workflow: Snakemake's, as a Snakefile has it.
        runs: runs to work on.

    Returns:
        The runs, of an experiment without the rounds that a gate has spared; and the process's controller.

    Raises:
        UserError: something that the run needs is not there.
    """
    from rloo_pipeline.snakemake_ext.controller import Controller

    controller = Controller(workflow, runs)
    with _file_errors_explained():
        controller.prepare()
    _controllers.append(controller)
    return controller.runs, controller


@contextmanager
def _file_errors_explained() -> Iterator[None]:
    """Turns an error of writing, as into a read-only results/, into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_FILES:
            raise
        error.filename = error.filename or str(Path.cwd())
        logging.raiseExceptions = False  # else each line that Snakemake's log has no space for is a traceback
        raise UserError(explain(error)) from None


def restore_values(workflow: Any, config: MutableMapping[str, Any]) -> None:
    """Gives values of `--config` in a workflow's configuration the types that they would have in a file.

    Raises:
        UserError: a value is not YAML.
    """
    from rloo_pipeline.snakemake_ext import configfiles

    settings = workflow.config_settings
    configfiles.restore_values(config, settings.config, settings.config_args or ())


def start() -> None:
    """Call it in `onstart` of a Snakefile that has this workflow as a module; Snakemake does not call the module's own.

    Raises:
        WorkflowError: the run cannot work as it is configured.
    """
    from snakemake.exceptions import WorkflowError

    try:
        with _file_errors_explained():
            for controller in _controllers:
                controller.start()
    except UserError as error:
        raise WorkflowError(str(error)) from None


def fail() -> None:
    """Call it in `onerror` of such a Snakefile, so that a run that a gate has ended gets its evaluation and report.

    Raises:
        SystemExit: 0, where that went well.
    """
    for controller in _controllers:
        controller.fail()
