"""A Snakemake process and its runs, as the controller's steps see them."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakemake.settings.types import DeploymentMethod

from rloo_pipeline.cluster import containers, nodes, slurm
from rloo_pipeline.config.run_set import RESULTS, RunSet
from rloo_pipeline.judging.run_files import stopped_after
from rloo_pipeline.runtime import installation
from rloo_pipeline.snakemake_ext.edited_functions import EditedFunctions

FINISHES = "RLOO_FINISHES"
"""Environment variable of the call that finishes a run which a gate has ended (`early_stop.finish`)."""


class SnakemakeCall:
    """One Snakemake process and its runs: a single run, or the runs of an experiment."""

    def __init__(self, workflow: Any, runs: RunSet) -> None:
        """Takes Snakemake's workflow and the configured runs."""
        self.workflow = workflow
        # a module's `prefix:` is prepended to all its files
        self.results = Path(workflow.modifier.path_modifier.modify(RESULTS))
        self.configured = runs
        self.runs = shortened(runs, self.results)
        """The runs. In an experiment, and in a call with FINISHES, runs that a gate has ended have only the rounds up
        to there.
        """
        self.folder = self.results / runs.name
        """Folder of the run or experiment."""
        configs = self.runs.configs.items()
        self.stopped = {run for run, config in configs if stopped_after(self.run_folder(run)) == config.rounds}
        """Runs (folders below results/) that a gate ended at the number of rounds that they now have."""
        self.main = bool(workflow.is_main_process)
        """False in the process of a job."""
        self.is_module = not workflow.modifier.is_main_snakefile()
        self.in_image = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method
        chosen = None if self.main else os.environ.get(nodes.IMAGE)
        self.image = chosen or containers.image(runs.first.container, installation.root())
        """The image for stages with `--sdm apptainer`; in a job, the one that its run started with."""
        # while rules are read, there is no executor yet, and local_exec is always true
        self.several_nodes = self.main and not workflow.dryrun and slurm.job_nodes() > 1
        """True in a SLURM job of several nodes, whose stages become steps of the job."""
        self.functions = EditedFunctions(self.runs, self.folder, in_job=not self.main)
        self.planned = False
        """True once Snakemake knows its jobs."""
        self.alone = False
        """True if this process holds the run's lock."""
        self.owner = ""
        """A message about the process that holds the lock."""
        self.config_copy: Path | None = None
        """The copy of the configuration that jobs read."""
        self.waits = ExitStack()
        """Shows that Snakemake is building the DAG, until closed."""

    @property
    def dry_run(self) -> bool:
        """True with `--dry-run`. Known from the first line of the Snakefile on."""
        return bool(self.workflow.output_settings.dryrun)

    @property
    def on_this_machine(self) -> bool:
        """True if jobs run on the same machine as this process, not as SLURM jobs or steps."""
        return self.main and not self.several_nodes and self.workflow.resource_settings.nodes is None

    @property
    def overlaps(self) -> bool:
        """True if updates run in parallel with rollouts, on any free node."""
        return any(config.rollout.lag for config in self.runs.configs.values())

    def run_folder(self, run: str) -> Path:
        """The folder of a run, given its path below results/."""
        return self.results / run

    def assets(self) -> list[Path]:
        """The folders that hold the runs' assets. Runs of an experiment share them, and have only links to them."""
        homes = (self.runs.homes.get(run, {}).get("assets", run) for run in self.runs.by_folder)
        return [self.run_folder(home) / "assets" for home in dict.fromkeys(homes)]

    def threads_beside(self, threads: int) -> int:
        """Threads of a stage that only observes: 0 if it runs on the same machine as the rounds, so that it never takes
        a core that a round waits for; otherwise `threads`.
        """
        return 0 if self.on_this_machine else threads

    def outputs(self) -> set[str]:
        """Files that the jobs of this call will write."""
        return {str(file) for job in self.workflow.dag.needrun_jobs() for file in job.output}

    def to_finish(self) -> list[str]:
        """Runs whose evaluation this call writes; all runs until the jobs are known."""
        outputs = self.outputs() if self.planned else None
        return [r for r in self.runs.configs if outputs is None or str(self.run_folder(r) / "summary.json") in outputs]


def shortened(runs: RunSet, results: Path) -> RunSet:
    """The runs. In an experiment, and in a call with FINISHES, those that a gate has ended are cut to the rounds that
    they have.

    Args:
        runs: the configured runs.
        results: the folder that theirs are in.
    """
    if not runs.experiment and FINISHES not in os.environ:
        return runs
    ends = {run: stopped_after(results / run) or config.rounds for run, config in runs.configs.items()}
    configs = {
        run: config.model_copy(update={"rounds": min(ends[run], config.rounds)}) for run, config in runs.configs.items()
    }
    return replace(runs, configs=configs)
