"""The runs of one Snakemake call: a single run, or an experiment's runs with the files that they share.

Runs share a file if everything that decides it is equal: the parameters of its stage (`Config.params`) and its input
files. Its folder, results/<experiment>/shared/<group>-<digest>/, is named after a digest of both, so adding or
reordering arms does not move it. A shared folder has a config.yaml, logs and benchmarks, like the folder of a run.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rloo_pipeline.config import experiment
from rloo_pipeline.config.error_messages import checked
from rloo_pipeline.config.experiment import Experiment
from rloo_pipeline.config.loading import is_experiment, read_mapping, validate
from rloo_pipeline.config.run import Config
from rloo_pipeline.config.run_jobs import RunJob, jobs_after_rounds, jobs_before_rounds, jobs_of_round
from rloo_pipeline.config.section import JSON
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import csv_rows

RESULTS = "results"
EXPERIMENT = "experiment.yaml"
"""File in an experiment's folder, written by the Snakemake process: name, base, arms with their rounds, seeds."""
T = TypeVar("T")


class Group(NamedTuple):
    """A group of files that are shared together."""

    stages: tuple[str, ...]
    """Stages that make them."""
    after: tuple[str, ...]
    """Groups whose files these stages read."""
    files: tuple[str, ...]
    """Files and folders, relative to the folder of a run."""


GROUPS = {
    row["group"]: Group(*(tuple(row[column].split()) for column in Group._fields))
    for row in csv_rows("config/shared_files.csv")
}
"""Files that runs can share: those of the warm start, and of the first round up to its update."""


@dataclass(frozen=True)
class RunSet:
    """The runs of a Snakemake call, by their folders below results/."""

    configs: Mapping[str, Config]
    experiment: Experiment | None = None
    homes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Folder of a run or of shared files → group → the folder of the group's files."""
    shared: Mapping[str, Config] = field(default_factory=dict)
    """Folder of shared files → a configuration that decides them."""

    @cached_property
    def first(self) -> Config:
        """The configuration of the first run."""
        return next(iter(self.configs.values()))

    @cached_property
    def name(self) -> str:
        """Name of the experiment or of the run; the folder below results/."""
        return self.experiment.experiment if self.experiment else self.first.run

    @cached_property
    def pattern(self) -> str:
        """Path of a run's folder for a rule; in an experiment it has a wildcard `run`."""
        return f"{RESULTS}/{{run}}" if self.experiment else f"{RESULTS}/{self.name}"

    @cached_property
    def by_folder(self) -> dict[str, Config]:
        """All configurations: of runs and of shared files."""
        return {**self.configs, **self.shared}

    @cached_property
    def users(self) -> dict[str, str]:
        """Folders of shared files → the runs that use them, in words."""
        runs: dict[str, list[str]] = {}
        for run in self.configs:
            for home in self.homes.get(run, {}).values():
                runs.setdefault(home, []).append(run)
        return {home: f"{of[0]} and {len(of) - 1} more" if of[1:] else of[0] for home, of in runs.items()}

    def of(self, wildcards: Any) -> Config:
        """The configuration that a job runs under."""
        return self.by_folder[self.folder_of(wildcards)]

    def folder_of(self, wildcards: Any) -> str:
        """The folder below results/ of a job's run, or of shared files."""
        return str(wildcards.run) if self.experiment else self.name

    def by_run(self, value: Callable[[Config], T]) -> T | Callable[[Any], T]:
        """A value for a rule: a constant for a single run, a function of the wildcards for an experiment."""
        if not self.experiment:
            return value(self.first)
        of_run = cache(lambda run: value(self.by_folder[run]))
        return lambda wildcards: of_run(wildcards.run)

    def path(self, wildcards: Any, file: str) -> str:
        """Path of a file in the folder of the job's run, or in the shared folder that holds it.

        Args:
            wildcards: the job's wildcards.
            file: relative to the folder of the run.
        """
        run = self.folder_of(wildcards)
        group = _group_of(file) if self.experiment else None
        return f"{RESULTS}/{self.homes[run][group] if group else run}/{file}"

    def file(self, pattern: str) -> str | Callable[[Any], str]:
        """An input of a rule: `path` applied to a pattern, which may have other wildcards."""
        if not self.experiment:
            return f"{self.pattern}/{pattern}"
        return lambda wildcards: self.path(wildcards, pattern.format(**wildcards) if "{" in pattern else pattern)


_GROUP_BY_FILE = {f"{file}/": group for group, (_, _, files) in GROUPS.items() for file in files}


def _group_of(file: str) -> str | None:
    """The group that has a file or its folder; None if no group has it."""
    return next((group for shared, group in _GROUP_BY_FILE.items() if f"{file}/".startswith(shared)), None)


def jobs_by_group(config: Config) -> Mapping[str, list[RunJob]]:
    """Group → the jobs of a run that make its files."""
    jobs: dict[str, list[RunJob]] = defaultdict(list)
    for job in chain(jobs_before_rounds(config), jobs_of_round(config, 1), jobs_after_rounds(config)):
        if group := _group_of(job.output):
            jobs[group].append(job)
    return jobs


def read_runs(file: Path, changes: tuple[str, ...] = ()) -> RunSet:
    """Reads the runs of a configuration file: those of an experiment, or a single run.

    Raises:
        UserError: as `runs_of`, or the file is missing or not YAML.
    """
    return runs_of(read_mapping(file, changes), file, str(file))


def runs_of(raw: Mapping[str, Any], file: Path | None, origin: str) -> RunSet:
    """The runs of a configuration.

    Args:
        raw: the mapping, as YAML or Snakemake gives it.
        file: file that it was read from; None if unknown.
        origin: name of this file in messages.

    Raises:
        UserError: a key is unknown, missing or out of range.
    """
    if not is_experiment(raw):
        config = validate(raw, origin)
        _require_choice([config], origin)
        return RunSet({config.run: config})
    plan = checked(Experiment, {**({"experiment": file.stem} if file else {}), **raw}, origin)
    below = experiment.configs_of(plan, file.parent if file else Path(), origin)
    configs = {f"{plan.experiment}/{name}": config for name, config in below.items()}
    _require_alike(configs, origin)
    _require_choice(list(configs.values()), origin)
    homes: dict[str, Mapping[str, str]] = {}
    shared: dict[str, Config] = {}
    for folder, config in configs.items():
        homes[folder] = _shared_folders(plan.experiment, config)
        for home in homes[folder].values():
            shared.setdefault(home, config)
            homes.setdefault(home, homes[folder])
    return RunSet(configs, plan, homes, shared)


def _require_choice(configs: Sequence[Config], origin: str) -> None:
    """Checks that `select` has something to choose from: several rounds or several arms."""
    arms = {config.arm_json for config in configs}
    if configs[0].select and len(arms) == 1 and len(configs[0].candidates) == 1:
        raise UserError(
            f"{origin}: select: there is one arm with one evaluated round, so there is nothing to choose from; set "
            "evaluation.every, or name more arms"
        )


def _require_alike(configs: Mapping[str, Config], origin: str) -> None:
    """Checks that runs agree on the keys that workflow rules read once for all of them."""
    keys = ["container", "deepspeed.nodes", "workers", "select", "functions"]
    if next(iter(configs.values())).select:  # arms must be compared by the same measure
        keys += ["dataset.dev", "dataset.eval", "correct.reward", "correct.threshold", "evaluation.num_prompts"]
        keys += ["evaluation.num_generations", "evaluation.temperature", "evaluation.max_completion_length"]
    depends_on = {"correct.reward": "deciding", "evaluation.max_completion_length": "longest_evaluated"}
    for key in keys:
        values = [attrgetter(depends_on.get(key, key))(config) for config in configs.values()]
        if any(other != values[0] for other in values):
            raise UserError(f"{origin}: {key}: all arms of an experiment need the same value; set it in the base")


def _shared_folders(name: str, config: Config) -> dict[str, str]:
    """For one run: group → folder of its files below results/."""
    homes: dict[str, str] = {}
    jobs = jobs_by_group(config)
    for group, (stages, after, _) in GROUPS.items():
        if group not in jobs:
            continue
        decides = [[_params(config, stage) for stage in stages], [homes[other] for other in after if other in homes]]
        if group == "rollout":  # its jobs also sample held-out completions, by keys that do not affect the round
            decides.append([config.held_out_each_round, config.evaluation.temperature])
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        homes[group] = f"{name}/shared/{group}-{digest}"
    return homes


def _params(config: Config, stage: str) -> JSON:
    """The keys that decide a stage of the warm start or of round 1, where `rollout.lag` has no effect."""
    params = config.params(stage)
    return params | {"rollout": {**params["rollout"], "lag": 0}} if "rollout" in params else params
