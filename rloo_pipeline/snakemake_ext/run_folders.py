"""Prepares the folders of runs before the first job: writes configurations and links.

In the folder of each run of an experiment, links stand where an ordinary run has the files that runs of the experiment
share, so that whatever reads a run finds them. The rules themselves use the shared files by their own paths.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from rloo_pipeline.artifacts import files
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import sealed
from rloo_pipeline.config.run_set import EXPERIMENT, GROUPS, RunSet, jobs_by_group


def write_config(folder: Path, config: Config, **changes: Any) -> None:
    """Writes the configuration as the stages read it, with all defaults; touches the file only if it changes.

    Leaves out `functions`, which concerns a single start of the run.
    """
    _write_yaml(folder / "config.yaml", config.model_dump(mode="json", exclude={"functions"}) | changes)


def mark_unfinished(folder: Path) -> None:
    """Makes the summary of a run older than all else, where there is one: jobs will change what it is made from."""
    if (file := folder / "summary.json").exists():
        os.utime(file, (0, 0))


def write_experiment(runs: RunSet, results: Path) -> None:
    """Writes what an experiment is, and the links of its runs.

    Args:
        runs: runs as configured, including rounds that a gate has skipped.
        results: the folder that theirs are in.
    """
    if runs.experiment is None:
        return
    arms, seed = runs.experiment.arm_changes(), runs.experiment.seeds[0]
    about = runs.experiment.model_dump(mode="json", include={"experiment", "base", "vary", "seeds"}) | {"arms": arms}
    about["rounds"] = {arm: runs.configs[f"{runs.name}/{arm}/{seed}"].rounds for arm in arms}
    _write_yaml(results / runs.name / EXPERIMENT, about)
    for run, config in runs.configs.items():
        jobs = jobs_by_group(config)
        for group, home in runs.homes[run].items():
            logs = [job.log for job in jobs[group]]
            tables = [log.replace("logs/", "benchmarks/").replace(".log", ".tsv") for log in logs]
            for file in (*GROUPS[group].files, *logs, *tables):
                _link(results / run / file, results / home / file)


def _link(link: Path, target: Path) -> None:
    """Makes a relative link, in place of whatever is there from before."""
    path = os.path.relpath(target, link.parent)
    if link.is_symlink() and link.readlink() == Path(path):
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    with files.atomic_write(link) as temporary:
        temporary.symlink_to(path)


def _write_yaml(path: Path, content: Any) -> None:
    write_text(path, sealed(yaml.safe_dump(content, sort_keys=False)))


def write_text(path: Path, text: str) -> None:
    """Writes a file, touched only when it changes."""
    if not path.exists() or path.read_text() != text:
        files.write_text(path, text)
