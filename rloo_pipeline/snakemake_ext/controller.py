"""What a Snakemake process does for a run besides its jobs: the one place where the Snakefile has side effects.

`install` is called once, by workflow/rules/common.smk; `start` and `fail` are Snakemake's `onstart` and `onerror`. A
workflow that is used as a `module:` has neither hook, so there `install` writes the configuration, stages start engines
of their own, and a run that a gate ended is finished by a call with `rounds` at the round reached.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from snakemake.logging import logger
from snakemake.path_modifier import PathModifier
from snakemake.settings.types import DeploymentMethod

from rloo_pipeline.cluster import containers, nodes
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import inputs, slurm_checks
from rloo_pipeline.report import origin
from rloo_pipeline.runtime import controller_watch, guard, scratch
from rloo_pipeline.runtime.environment import prepare_jobs
from rloo_pipeline.snakemake_ext import ancient_inputs, early_stop, locks, steps
from rloo_pipeline.snakemake_ext.logger import LogHandler
from rloo_pipeline.trackers import trackers
from rloo_pipeline.workers import manager

RENAMED = {"update_passing": "update_transient"}
"""Rules that profiles may still name as they were called before."""


class Controller:
    """One Snakemake process and the run that it works on."""

    def __init__(self, workflow: Any, config: Config) -> None:
        """Args: Snakemake's workflow, and the run's configuration."""
        self._workflow, self._config = workflow, config
        # a module's `prefix:` goes before all its files
        self.run = Path(workflow.modifier.path_modifier.modify(f"results/{config.run}"))
        """The run's folder."""
        self.image = containers.image(config, Path(str(workflow.current_basedir)).parents[1])
        """The image that stages run in with `--sdm apptainer`."""
        self._in_image = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method
        self._main = bool(workflow.is_main_process)
        self._is_module = not workflow.modifier.is_main_snakefile()
        self._held = locks.Hold(False)
        # while rules are read, Snakemake has no executor yet, and local_exec is always true
        self.several_nodes = self._main and not workflow.dryrun and steps.nodes() > 1
        """Whether this is the Snakemake of one SLURM job of several nodes: its stages become steps of the job."""

    @property
    def stopped(self) -> bool:
        """Whether a gate ended the run at the number of rounds that it has now."""
        return early_stop.stopped_after(self.run) == self._config.rounds

    def prepare(self) -> None:
        """Prepares this process: changes to Snakemake, the environment of its jobs, the run's lock.

        Raises:
            UserError: the image or a tracker's package is not there, or Snakemake is not the version this is made for.
        """
        guard.require("snakemake")
        guard.require_callable(PathModifier, "modify", "(self, path, property)")
        for handler in self._log_handlers():
            handler.add_run(self._config, self.run, self._workflow.logger_manager.get_logfile())
        # an input function names the round before, which Snakemake resolves recursively: a few frames a round
        sys.setrecursionlimit(1_000_000)
        ancient_inputs.find_all_jobs()
        prepare_jobs()
        if self._in_image:
            containers.require(self.image)
            containers.prepare(self._config, self.image)
            os.environ[nodes.IMAGE] = self.image
        else:
            trackers.require(self._config.trackers)
        if self._workflow.output_settings.dryrun:
            for note in inputs.require(self._config):
                logger.warning(note)
        elif self._main:
            self._hold_run()

    def _log_handlers(self) -> list[LogHandler]:
        """The logger plugin, where it is used and this is no job."""
        return [one for one in self._workflow.logger_manager.get_log_handlers() if isinstance(one, LogHandler)]

    def _hold_run(self) -> None:
        """Before Snakemake looks at its own lock."""
        origin.note_commit()
        self._held = locks.hold(Path.cwd(), self._config.run)
        if self._held.message:
            logger.info(self._held.message)
        if self._held.alone and self._is_module:
            self._write_config()

    def rules_read(self) -> None:
        """After all rules: makes stages steps of this SLURM job, where it has several nodes.

        Raises:
            UserError: a profile sets threads or resources of a rule that is not here; Snakemake itself ignores that.
        """
        settings, rules = self._workflow.resource_settings, {rule.name for rule in self._workflow.rules}
        unknown = {*settings.overwrite_resources, *settings.overwrite_threads} - rules
        if unknown and self._main and not self._is_module:
            hints = [f"{name} is now {RENAMED[name]}" for name in sorted(unknown & RENAMED.keys())]
            raise UserError(
                f"set-resources or set-threads names no rule of this workflow: {', '.join(sorted(unknown))}"
                + (f" ({'; '.join(hints)})" if hints else f"; its rules are {', '.join(sorted(rules))}")
            )
        if self.several_nodes:
            steps.spread(self._workflow.rules, self._workflow.global_resources)

    def start(self) -> None:
        """Before the first job: checks what the run needs, writes its configuration, starts its workers.

        A dry run, a picture of the DAG and a finished run do not come here, so they write nothing.

        Raises:
            UserError: the run cannot work as it is configured.
        """
        if not self._main:
            return
        if self._workflow.executor_plugin.name == "slurm":
            raise UserError(
                "executor: slurm submits cancelled jobs again and loses tasks of arrays; in the profile, "
                f"{slurm_checks.USE_OURS}"
            )
        for note in inputs.require(self._config):
            logger.warning(note)
        if self._held.alone:
            self._write_config()
            early_stop.forget(self.run, self._config.rounds)
        if not self._workflow.local_exec or self.several_nodes:  # jobs are on other machines
            return
        scratch.use(self._workflow.snakemake_tmp_dir)
        os.environ[controller_watch.VARIABLE] = controller_watch.name()
        if not self._in_image:
            rules = {job.rule for job in self._workflow.dag.needrun_jobs()}
            stages = {rule.shellcmd.split()[1] for rule in rules if rule.shellcmd}
            manager.start(self._config, self._workflow.resource_settings.cores, self.run / "logs" / "workers", stages)

    def fail(self) -> None:
        """After a job failed: where a gate has ended the run, finishes it as a run of the rounds that it has.

        That takes a second call of Snakemake (diagnosis/diagnosis.py says why). This process holds the run meanwhile.

        Raises:
            SystemExit: 0, where that went well.
        """
        stopped = early_stop.stopped_after(self.run)
        if not (self._held.alone and stopped and stopped < self._config.rounds) or self._workflow.dag_settings.targets:
            return
        command = early_stop.command(stopped, self._workflow.config_settings.config_args or [])
        if command is None:
            return
        logger.info(f"A gate ended the run after round {stopped}: now its evaluation and report.")
        self._write_config(rounds=stopped)
        for handler in self._log_handlers():
            handler.give_terminal_back()
        if not subprocess.run(command, check=False).returncode:
            reason = self.run / early_stop.STOPPED
            logger.info(f"{self.run} ended after round {stopped} of {self._config.rounds}; {reason} says why.")
            raise SystemExit(0)

    def _write_config(self, **changes: Any) -> None:
        """The configuration as the stages read it, with every default filled in; touched only when it changes."""
        text = yaml.safe_dump(self._config.model_dump(mode="json") | changes, sort_keys=False)
        path = self.run / "config.yaml"
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(path)
