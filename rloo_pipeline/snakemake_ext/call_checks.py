"""Refuses Snakemake calls that cannot work, or that would not do what the user meant."""

import os
from pathlib import Path

from snakemake.logging import logger

from rloo_pipeline.before_run import inputs, slurm_checks
from rloo_pipeline.cluster import containers, nodes
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.snakemake_ext import early_stop, run_sources
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall
from rloo_pipeline.trackers import trackers


def require_packages(call: SnakemakeCall) -> None:
    """Checks MLflow's store, and that the image for stages and its binds exist or, without one, that packages of
    trackers are installed.

    Raises:
        UserError: the image, a folder to bind or a tracker's package is missing, MLflow's store is a folder, or
            Apptainer would drop the environment.
    """
    configs = call.runs.configs.values()
    names = {name for config in configs for name in config.trackers}
    if not call.in_image:
        trackers.require(sorted(names))
        return
    trackers.require_store(names)
    containers.require(call.image)
    containers.refuse_clean_environment(call.workflow.deployment_settings.apptainer_args)
    if not call.main or call.workflow.resource_settings.nodes is None:  # otherwise jobs run on other machines
        containers.refuse_missing_binds(in_job=not call.main)
    for config in configs:
        containers.prepare(config, call.image, in_job=not call.main)
    os.environ[nodes.IMAGE] = call.image


def require_inputs(call: SnakemakeCall) -> None:
    """Checks the inputs of each run. Identical inputs are checked only once.

    Raises:
        UserError: an input is missing, or cannot be used as configured.
    """
    for run, config in call.runs.by_folder.items():
        if lost := run_sources.lost(config, call.run_folder(run) / "assets"):
            raise UserError(lost)
    alike = {config.arm_json: config for config in call.runs.configs.values()}
    notes = [note for config in alike.values() for note in inputs.require(config)]
    if any(config.container.image for config in alike.values()) and not call.in_image:
        notes.append("container.image has no effect without --sdm apptainer: stages run without an image")
    if call.on_this_machine and not call.in_image and devices.has_gpu() and devices.packages_are_for_gpus() is False:
        notes.append(
            "the packages installed here are for CPUs, on which all will run; for the GPUs of this machine, run `make "
            "setup ACCELERATOR=cuda`"
        )
    for note in dict.fromkeys(notes):
        logger.warning(note)


def warn_in_dry_run(call: SnakemakeCall) -> None:
    """In a dry run, prints the errors that would end the real run.

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
    """Refuses profiles that set threads or resources of an unknown rule, which Snakemake itself ignores."""
    settings, rules = call.workflow.resource_settings, {rule.name for rule in call.workflow.rules}
    unknown = {*settings.overwrite_resources, *settings.overwrite_threads} - rules
    if unknown and call.main and not call.is_module:
        raise UserError(
            "set-resources or set-threads names a rule that this workflow does not have: "
            f"{', '.join(sorted(unknown))}; its rules are {', '.join(sorted(rules))}"
        )


def refuse_executor(call: SnakemakeCall) -> None:
    """Refuses Snakemake's own SLURM executor, and ranks on several nodes for jobs that run on this machine alone."""
    if call.workflow.executor_plugin.name == "slurm":
        raise UserError(
            "executor: slurm submits cancelled jobs again and loses tasks of arrays; in the profile, "
            f"{slurm_checks.USE_OURS}"
        )
    most = max(config.deepspeed.nodes for config in call.runs.configs.values())
    if most == 1 or not call.workflow.local_exec or call.workflow.executor_plugin.name == "touch":
        return
    if any("mpi" in job.rule.resources for job in call.workflow.dag.needrun_jobs()):
        nodes.require_job(most)
