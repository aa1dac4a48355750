"""Work of a Snakemake process besides a run's jobs: all side effects of the Snakefile are here.

workflow/rules/common.smk calls `install` once; `start` and `fail` are Snakemake's `onstart` and `onerror`. Snakemake
does not call these hooks of a workflow that is used as a `module:`; a Snakefile can call them (`rloo init` writes one
that does). If it does not, `install` writes the configuration, stages start engines of their own, and a call with
`rounds` set to the reached round finishes a run that a gate ended.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import ConfigSettings, DeploymentMethod

from rloo_pipeline.artifacts import files
from rloo_pipeline.artifacts.model_files import POLICIES
from rloo_pipeline.before_run import inputs, slurm_checks, warm_engines
from rloo_pipeline.cluster import containers, node_workers, nodes
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RESULTS, RunSet
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.run_files import is_finished, stopped_after
from rloo_pipeline.report import origin
from rloo_pipeline.runtime import controller_watch, guard, installation, scratch
from rloo_pipeline.runtime.environment import prepare_jobs
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.snakemake_ext import (
    adoption,
    ancient_inputs,
    early_stop,
    edited_functions,
    locks,
    lost_metadata,
    node_exchange,
    planning_speed,
    run_folders,
    run_sources,
    shared_cache,
    steps,
)
from rloo_pipeline.snakemake_ext.failures import stage_of
from rloo_pipeline.snakemake_ext.logger import LogHandler
from rloo_pipeline.trackers import trackers
from rloo_pipeline.workers import manager

if TYPE_CHECKING:
    from rloo_pipeline.snakemake_ext.run_display import RunDisplay


class Controller:
    """One Snakemake process and its runs: a single run, or the runs of an experiment."""

    def __init__(self, workflow: Any, runs: RunSet) -> None:
        """Args: Snakemake's workflow, and the runs as configured."""
        self._workflow = workflow
        # a module's `prefix:` goes before all its files
        self._results = Path(workflow.modifier.path_modifier.modify(RESULTS))
        self._configured = runs
        self.runs = early_stop.shortened(runs, self._results)
        """The runs, of an experiment without the rounds that a gate has spared."""
        self.folder = self._results / runs.name
        """Folder of the run or of the experiment."""
        self.stopped = {run for run, config in self.runs.configs.items() if self._stopped_after(run) == config.rounds}
        """Runs, by their folders below results/, that a gate ended at the number of rounds that they have now."""
        self._in_image = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method
        self._main = bool(workflow.is_main_process)
        self._functions = edited_functions.EditedFunctions(self.runs, self.folder, in_job=not self._main)
        chosen = None if self._main else os.environ.get(nodes.IMAGE)
        self.image = chosen or containers.image(runs.first, installation.root())
        """The image that stages run in with `--sdm apptainer`: in a job the one that its run started with."""
        self._is_module = not workflow.modifier.is_main_snakefile()
        self._held = locks.Hold(False)
        self._waits = ExitStack()
        self._config_copy: Path | None = None
        self._before: Mapping[str, Config] = {}
        # while rules are read, Snakemake has no executor yet, and local_exec is always true
        self.several_nodes = self._main and not workflow.dryrun and steps.nodes() > 1
        """True in the Snakemake of a SLURM job of several nodes; its stages become steps of the job."""

    def run_folder(self, run: str) -> Path:
        """The folder of a run, by its path below results/."""
        return self._results / run

    def _stopped_after(self, run: str) -> int | None:
        return stopped_after(self._results / run)

    def threads_beside(self, threads: int) -> int:
        """Threads of a stage that only observes: 0 if it runs beside the rounds on this machine, so that it never takes
        a core that a round waits for; otherwise `threads`.
        """
        return 0 if self._on_this_machine() else threads

    def _on_this_machine(self) -> bool:
        """True if jobs run beside this process, not as SLURM jobs or steps."""
        return self._main and not self.several_nodes and self._workflow.resource_settings.nodes is None

    def prepare(self) -> None:
        """Prepares this process: changes to Snakemake, the environment of its jobs, the run's lock.

        Raises:
            UserError: the image or a tracker's package is missing, or this version of Snakemake is not supported.
        """
        scratch.claim(self._workflow.snakemake_tmp_dir)  # first: a kill before this leaves the folder behind
        guard.require("snakemake")
        self._tell_displays()
        _allow_many_rounds()
        ancient_inputs.find_all_jobs()
        if self._workflow.workflow_settings.cache is not None:
            shared_cache.make_safe()
        dry_run = self._workflow.output_settings.dryrun
        if dry_run and self._only_logger():
            planning_speed.report_briefly()
        prepare_jobs()
        self._require_packages()
        if self._main:
            logger.addFilter(self._on_message)
        if dry_run:
            self._warn()
        elif self._main:
            self._hold_run()

    def rules_read(self) -> None:
        """Runs after all rules are read. Limits stages to this machine's GPUs, or makes them steps of a multi-node job.

        Raises:
            UserError: a profile sets threads or resources of an unknown rule; Snakemake itself ignores that.
        """
        rules, limits = self._workflow.rules, self._workflow.global_resources
        if self._main and not self._is_module:
            self._refuse_unknown_rules()
        if self._workflow.workflow_settings.cache:
            self._refuse_unpinned()
        planning_speed.note_parameters(rules)
        if self.several_nodes:
            steps.spread(rules, limits, anywhere=self._overlaps())
        if self._on_this_machine():
            steps.limit(rules, limits, self.runs.configs.values())

    def start(self) -> None:
        """Runs before the first job: checks what the run needs, writes its configuration, starts its workers.

        Dry runs, pictures of the DAG and finished runs do not call it, so they write nothing.

        Raises:
            UserError: the run cannot work as it is configured.
        """
        self._waits.close()
        if not self._main:
            return
        self._refuse_executor()
        self._refuse_second_process()
        if self.runs.experiment:  # if an arm fails, the others continue, as with --keep-going
            self._workflow.scheduler.keepgoing = True
        only_first_interrupt()
        self._require_inputs()
        outputs = set(self._outputs())
        again = [run for run in self.runs.configs if str(self._results / run / "summary.json") in outputs]
        self._refuse_fewer_rounds(again)
        self._refuse_kept_files()
        self._settle_functions()
        if self._workflow.executor_plugin.name == "touch":
            adoption.check(self.runs, self._results)
        self._freeze_config()
        self._write_configs()
        for run in again:
            run_folders.mark_unfinished(self._results / run)
        for run, config in self.runs.configs.items():
            early_stop.forget(self._results / run, config.rounds)
        lost = node_exchange.lost(self._workflow.dag.needrun_jobs())
        if self._workflow.local_exec:  # jobs are not on other machines
            self._use_this_machine(lost)
        else:
            node_exchange.refuse(self.runs.configs.values(), lost)

    def fail(self) -> None:
        """Runs after a job failed. If a gate has ended the run, finishes it as a run of the rounds that it has.

        Raises:
            SystemExit: with 0 on success.
        """
        self._show_experiment()
        stops = {run: self._stopped_after(run) or config.rounds for run, config in self.runs.configs.items()}
        ended = {run: stop for run, stop in stops.items() if stop < self.runs.configs[run].rounds}
        if self._held.alone and ended and not self._workflow.dag_settings.targets:
            early_stop.finish(self.runs, self._results, ended, self._config_copy, self._give_terminal_back)

    def _tell_displays(self) -> None:
        for display in self._displays():
            for run, config in self.runs.configs.items():
                display.add_run(config, self._results / run, self._workflow.logger_manager.get_logfile())
            if self.runs.experiment:
                display.add_experiment(self.folder / "experiment.html", self.runs.users)

    def _give_terminal_back(self) -> None:
        for display in self._displays():
            display.give_terminal_back()

    def _displays(self) -> list[RunDisplay]:
        """Our logger plugin's display, if the plugin is active and shows anything, and this process is not a job."""
        handlers = self._workflow.logger_manager.get_log_handlers()
        return [handler.display for handler in handlers if isinstance(handler, LogHandler) and handler.display]

    def _only_logger(self) -> bool:
        """True if only such a display gets Snakemake's reports."""
        return 0 < len(self._displays()) == len(self._workflow.logger_manager.get_log_handlers())

    def _require_packages(self) -> None:
        """Checks the image that stages run in, or the packages of trackers here."""
        if not self._in_image:
            trackers.require(sorted({name for config in self.runs.configs.values() for name in config.trackers}))
            return
        containers.require(self.image)
        for config in self.runs.configs.values():
            containers.prepare(config, self.image, in_job=not self._main)
        os.environ[nodes.IMAGE] = self.image

    def _warn(self) -> None:
        """Prints in a dry run the errors that a run would end with."""
        self._require_inputs()
        for warning in (*self._longer(self.runs.configs), self._functions.notice()):
            if warning:
                logger.warning(warning)

    def _require_inputs(self) -> None:
        """Checks the inputs of each run; identical inputs are checked once."""
        alike = {config.arm_json: config for config in self.runs.configs.values()}
        for note in dict.fromkeys(note for config in alike.values() for note in inputs.require(config)):
            logger.warning(note)

    def _hold_run(self) -> None:
        """Takes the run's lock before Snakemake looks at its own."""
        origin.note_commit()
        self._held = locks.hold(Path.cwd(), self.runs.name)
        if self._held.alone and self._held.message:
            logger.info(self._held.message)
        if self._held.alone and self._is_module:
            self._refuse_fewer_rounds(self.runs.configs)
            self._before = lost_metadata.written(self.runs, self._results)
            self._functions.settle()
            self._write_configs()

    def _refuse_unknown_rules(self) -> None:
        settings, rules = self._workflow.resource_settings, {rule.name for rule in self._workflow.rules}
        if unknown := {*settings.overwrite_resources, *settings.overwrite_threads} - rules:
            raise UserError(
                f"set-resources or set-threads names no rule of this workflow: {', '.join(sorted(unknown))}; its rules "
                f"are {', '.join(sorted(rules))}"
            )

    def _refuse_unpinned(self) -> None:
        if not all(map(run_sources.are_pinned, self.runs.configs.values())):
            raise UserError(
                "--cache: its key does not tell what the Hub has under a branch or a tag; give model.revision and the "
                "revision of each dataset as commits of 40 digits, or leave --cache out"
            )

    def _refuse_executor(self) -> None:
        if self._workflow.executor_plugin.name == "slurm":
            raise UserError(
                "executor: slurm submits cancelled jobs again and loses tasks of arrays; in the profile, "
                f"{slurm_checks.USE_OURS}"
            )

    def _refuse_second_process(self) -> None:
        if not self._held.alone:  # the other process has skipped or cleared Snakemake's own lock, or not taken it yet
            locks.leave_to_owner(self._workflow.persistence)
            raise UserError(self._held.message)

    def _refuse_kept_files(self) -> None:
        if kept := self._kept():
            raise UserError(kept)

    def _settle_functions(self) -> None:
        self._functions.settle(self._workflow)
        if notice := self._functions.notice():
            logger.info(notice)

    def _use_this_machine(self, lost: Iterable[Path]) -> None:
        if not self.several_nodes:
            scratch.use(self._workflow.snakemake_tmp_dir)
            os.environ[controller_watch.VARIABLE] = controller_watch.name()
        for run in self.runs.by_folder:  # a killed update's other nodes may have written while its folder was removed
            files.remove_temporary(self._results / run / POLICIES, "*")
        node_exchange.restore(lost, self.runs.first.deepspeed.nodes, self._program())
        if not self._workflow.storage_settings.notemp:
            configs = {self._results / run: config for run, config in self.runs.configs.items()}
            node_exchange.start(configs, steps.nodes() if self.several_nodes else 1)
        if "://" not in self.image or not self._in_image:  # which Apptainer would fetch again for each worker
            self._start_workers()

    def _start_workers(self) -> None:
        """Starts workers for the stages that will run, on this machine or on the nodes of this job."""
        stages = {stage_of(job.rule) for job in self._workflow.dag.needrun_jobs()} - {""}
        cores, logs = self._workflow.resource_settings.cores, self.folder / "logs" / "workers"
        first, runs, without = self.runs.first, len(self.runs.configs), warm_engines.left_out(self.runs.first)
        program = self._program()
        if not self.several_nodes:
            manager.start(first, cores, logs, stages, runs, without, program)
        elif first.workers != "never" and steps.have_whole_nodes(self._workflow.rules, self._workflow.global_resources):
            config = self._results / next(iter(self.runs.configs)) / "config.yaml"
            without |= {"trainer"} if self._overlaps() else set()
            per_node = self._workflow.global_resources["gpu_stages"].value // steps.nodes()
            node_workers.start(config, logs, stages, runs, without, program, per_node)

    def _program(self) -> list[str]:
        """The command `rloo`, which runs in the image if stages do."""
        return nodes.program(shlex.split(self._workflow.deployment_settings.apptainer_args))

    def _overlaps(self) -> bool:
        """True if updates run beside rollouts, on any node that is free."""
        return any(config.rollout.lag for config in self.runs.configs.values())

    def _kept(self) -> str | None:
        """A sentence if a file would stay that does not match the configuration or the model."""
        made = set(self._outputs())
        assets = (self._results / run / "assets" for run in self.runs.by_folder)
        replaced = (run_sources.replaced(folder) for folder in assets if str(folder) not in made)
        kept = lost_metadata.kept(self._workflow, self.runs, self._results, self._before)
        kept = kept or self._functions.kept(self._workflow)
        return kept or next(filter(None, replaced), None)

    def _missing(self) -> str | None:
        """An error message if a finished run lacks a file, unless a module or --until asks for only part of the run."""
        return None if self._workflow.dag_settings.targets else lost_metadata.missing(self.runs, self._results)

    def _on_message(self, record: logging.LogRecord) -> bool:
        """Filters Snakemake's messages, since some mark moments that have no hook. Runs in the thread that logs.

        Before the DAG is built, asks for `--rerun-incomplete` and guards Snakemake's records. If the folder is locked,
        names the owner instead of advising to unlock it. If no job is left to run, looks for files that another
        configuration made.

        Raises:
            WorkflowError: no job is left to run, although a file is not what the configuration describes.
        """
        message = str(record.msg)
        if message.startswith("Building DAG"):
            self._workflow.dag_settings.force_incomplete = True
            lost_metadata.ignore_damaged_records(self._workflow.persistence)
            self._waits.enter_context(announcing("Snakemake is building the DAG", logger.info))
        if "Directory cannot be locked" in message and self._held.message:
            record.msg = f"Error: {self._held.message}"
        if message.startswith("Nothing to be done") and (kept := self._kept() or self._missing()):
            if not self._workflow.dryrun:
                raise WorkflowError(kept)
            logger.warning(kept)
        return True

    def _freeze_config(self) -> None:
        """Copies the configuration; from now on, jobs and the call that finishes a run after a gate read the copies."""
        file = next(iter(self._workflow.config_settings.configfiles), None)
        folder = run_folders.FROZEN / self.runs.name
        self._config_copy = run_folders.freeze_config(self._workflow.config, self.runs, file, folder)
        if self._config_copy:
            self._workflow.config_settings = ConfigSettings(configfiles=[self._config_copy])

    def _outputs(self) -> Iterator[str]:
        """Files that the jobs of this call will write."""
        for job in self._workflow.dag.needrun_jobs():
            yield from map(str, job.output)

    def _longer(self, runs: Iterable[str]) -> Iterator[str]:
        """A sentence for each run whose evaluation would be overwritten by one of fewer rounds."""
        for run in runs:
            if longer := early_stop.overwritten(self._results / run, self.runs.configs[run].rounds):
                yield longer

    def _refuse_fewer_rounds(self, runs: Iterable[str]) -> None:
        """Raises: UserError: this call would overwrite the evaluation of a longer run."""
        for longer in self._longer(runs):
            raise UserError(longer)

    def _show_experiment(self) -> None:
        """Makes the page of an experiment from its finished runs; others may have failed."""
        finished = (is_finished(self._results / run, config) for run, config in self.runs.configs.items())
        if self.runs.experiment and any(finished):
            subprocess.run([sys.executable, "-m", "rloo_pipeline", "experiment", str(self.folder)], check=False)

    def _write_configs(self) -> None:
        """Writes the configuration of each run; for an experiment, also its own configuration and the links."""
        for run, config in self.runs.by_folder.items():
            run_folders.write_config(self._results / run, config)
        run_folders.write_experiment(self._configured, self._results)


def _allow_many_rounds() -> None:
    # input functions name the previous round, which Snakemake resolves recursively: a few frames per round
    sys.setrecursionlimit(1_000_000)
    gc.set_threshold(1_000_000)  # the DAG of many rounds has millions of long-lived objects
    atexit.register(gc.freeze)  # so that the process does not go through all of them when it ends


def only_first_interrupt() -> None:
    """Lets only the first SIGINT of this process raise KeyboardInterrupt: a second one, while Snakemake ends its jobs,
    would break its event loop with a traceback. Leaves a handler of someone else alone.

    A handler of our own also keeps asyncio from installing one that cancels a task instead.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: int | FrameType | None) -> None:
    # a function rather than SIG_IGN, which child processes would inherit
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt
