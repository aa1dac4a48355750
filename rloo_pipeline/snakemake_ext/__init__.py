"""Every line that touches the insides of Snakemake or of one of its plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rloo_pipeline.config import Config

if TYPE_CHECKING:
    from rloo_pipeline.snakemake_ext.controller import Controller


def install(workflow: Any, config: Config) -> Controller:
    """Prepares a Snakemake process for a run.

    Args:
        workflow: Snakemake's, as a Snakefile has it.
        config: the run's configuration.

    Raises:
        UserError: something that the run needs is not there.
    """
    from rloo_pipeline.snakemake_ext.controller import Controller

    controller = Controller(workflow, config)
    controller.prepare()
    return controller
