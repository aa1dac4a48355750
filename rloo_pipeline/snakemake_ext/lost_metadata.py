"""Files that a changed configuration does not make again, since Snakemake has no record of how they were made.

Its records are in .snakemake/metadata. Where that is removed, or results/ is copied without it, Snakemake keeps a file
whatever the configuration says, and new rounds would follow on rounds of another one. The configuration that the run
last had is in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakemake.logging import logger
from snakemake.settings.enums import RerunTrigger

from rloo_pipeline.config import STAGES, Config
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.config.section import JSON, flatten
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.snakemake_ext.failures import stage_of, typed


def kept(workflow: Any, runs: RunSet, folder: Path, before: Mapping[str, Config]) -> str | None:
    """A sentence if a file stays that was made with another value of a key that decides it.

    Args:
        workflow: Snakemake's, which knows by now which jobs it needs.
        runs: as configured.
        folder: the folder that theirs are in.
        before: earlier configurations of runs; of the others they are in their folders.
    """
    if RerunTrigger.PARAMS not in workflow.rerun_triggers:  # by --rerun-triggers: no key counts
        return None
    for run, files in _without_record(workflow, runs).items():
        now = runs.by_folder[run]
        earlier = before.get(run) or _written(folder / run) or now
        for stage, file in files.items():
            old, new = _decides(earlier, stage), _decides(now, stage)
            if key := next((key for key in old | new if old.get(key) != new.get(key)), None):
                return (
                    f"{file} was made with another value of {key}, and would stay, since .snakemake, which records how "
                    "files were made, has nothing about it; put .snakemake back, give the run another name, delete the "
                    "file, or make all files of the run again with --forceall"
                )
    return None


def missing(runs: RunSet, folder: Path) -> str | None:
    """An error message if a finished run lacks a file that its user wants, though Snakemake no longer needs it."""
    for run, config in runs.configs.items():
        if not run_files.is_finished(folder / run, config):
            continue
        evaluations = (f"evaluation/{name}/completions.parquet" for name in config.evaluated)
        for name in ("policies/00000", f"policies/{config.rounds:05d}", *evaluations):
            file = folder / run / name
            if not file.exists():
                rounds = ", with all rounds, since states between them are not kept" if config.rounds else ""
                return (
                    f"{file} is missing, and nothing else of the finished run needs it: put it back, or make it "
                    f"again{rounds if 'policies' in name else ''}: {typed()} -- {file}"
                )
    return None


def ignore_damaged_records(persistence: Any) -> None:
    """Makes Snakemake treat a record that is not a JSON object as missing; otherwise it ends with a traceback.

    Args:
        persistence: Snakemake's persistence, which reads the records of this process.
    """
    read = getattr(persistence, "_io_read", None)
    if read is None:  # records in a database
        return

    def read_or_ignore(subject: str, id: str) -> Any:
        try:
            record = read(subject, id)
        except ValueError:  # not UTF-8
            record = None
        if isinstance(record, dict):
            return record
        logger.warning(f"Ignored a damaged record of how {id} was made: {persistence._record_path(subject, id)}")
        return {}

    persistence._io_read = read_or_ignore


def _without_record(workflow: Any, runs: RunSet) -> dict[str, dict[str, str]]:
    """Run → stage → a file of it that stays and that Snakemake has no record of."""
    files: dict[str, dict[str, str]] = {}
    dag = workflow.dag
    for job in dag.jobs:
        stage = stage_of(job.rule)
        if stage in STAGES and dag.reason(job).no_metadata and not dag.needrun(job):
            run = getattr(job.wildcards, "run", runs.name)
            files.setdefault(run, {}).setdefault(stage, str(job.output[0]))
    return {run: files[run] for run in files if run in runs.by_folder}


def written(runs: RunSet, folder: Path) -> dict[str, Config]:
    """The configurations that are in the folders of runs."""
    return {run: config for run in runs.by_folder if (config := _written(folder / run))}


def _written(run: Path) -> Config | None:
    try:
        return run_files.read_config(run)
    except UserError:
        return None


def _decides(config: Config, stage: str) -> JSON:
    """The values that decide a stage, by key; the rollout rule has the lag, too."""
    lag = {"rollout.lag": config.rollout.lag} if stage == "rollout" else {}
    return flatten(config.params(stage)) | lag
