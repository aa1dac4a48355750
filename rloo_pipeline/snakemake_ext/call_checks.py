"""Refuses calls of Snakemake that could not work, or would not do what the user meant."""

from __future__ import annotations

import os
from pathlib import Path

from snakemake.logging import logger

from rloo_pipeline.before_run import inputs, slurm_checks
from rloo_pipeline.cluster import containers, nodes
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import early_stop, run_sources
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall
from rloo_pipeline.trackers import trackers


def require_packages(call: SnakemakeCall) -> None:
    """Checks the image that stages run in, or the packages of trackers here.

    Raises:
        UserError: the image or a tracker's package is missing.
    """
    configs = call.runs.configs.values()
    if not call.in_image:
        trackers.require(sorted({name for config in configs for name in config.trackers}))
        return
    containers.require(call.image)
    for config in configs:
        containers.prepare(config, call.image, in_job=not call.main)
    os.environ[nodes.IMAGE] = call.image


def require_inputs(call: SnakemakeCall) -> None:
    """Checks the inputs of each run; identical inputs are checked once.

    Raises:
        UserError: an input is missing, or cannot be used as configured.
    """
    for run, config in call.runs.by_folder.items():
        if lost := run_sources.lost(config, call.run_folder(run) / "assets"):
            raise UserError(lost)
    alike = {config.arm_json: config for config in call.runs.configs.values()}
    for note in dict.fromkeys(note for config in alike.values() for note in inputs.require(config)):
        logger.warning(note)


def warn_in_dry_run(call: SnakemakeCall) -> None:
    """Prints in a dry run the errors that a run would end with.

    Raises:
        UserError: an input is missing, or Snakemake cannot write its records.
    """
    if call.dry_run:
        records = Path(".snakemake")
        if not os.access(records if records.exists() else ".", os.W_OK):
            raise UserError(
                f"{records.absolute()}: this user cannot write there, which Snakemake does even in a dry run; `rloo "
                "watch` shows a run and only reads it"
            )
        require_inputs(call)
        for warning in (*early_stop.longer_runs(call), call.functions.notice()):
            if warning:
                logger.warning(warning)


def refuse_unknown_rules(call: SnakemakeCall) -> None:
    """Raises: UserError: a profile sets threads or resources of an unknown rule; Snakemake itself ignores that."""
    settings, rules = call.workflow.resource_settings, {rule.name for rule in call.workflow.rules}
    unknown = {*settings.overwrite_resources, *settings.overwrite_threads} - rules
    if unknown and call.main and not call.is_module:
        raise UserError(
            f"set-resources or set-threads names no rule of this workflow: {', '.join(sorted(unknown))}; its rules "
            f"are {', '.join(sorted(rules))}"
        )


def refuse_executor(call: SnakemakeCall) -> None:
    """Raises: UserError: jobs would be submitted by the SLURM plugin itself."""
    if call.workflow.executor_plugin.name == "slurm":
        raise UserError(
            "executor: slurm submits cancelled jobs again and loses tasks of arrays; in the profile, "
            f"{slurm_checks.USE_OURS}"
        )
