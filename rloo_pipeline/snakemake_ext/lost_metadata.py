"""Finds files that a changed configuration would not make again, because Snakemake has no record of how they were made.

Snakemake's records are in .snakemake/metadata. If that is removed, or results/ is copied without it, Snakemake keeps
files whatever the configuration says, and new rounds would build on rounds of another configuration. The run's folder
has the configuration that the run last had.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from snakemake.logging import logger
from snakemake.settings.enums import RerunTrigger

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.model_files import policy_folder
from rloo_pipeline.config import JSON, STAGES, Config, flatten
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.judging import run_files
from rloo_pipeline.snakemake_ext import replaced_rewards, run_sources
from rloo_pipeline.snakemake_ext.failures import stage_of, typed_command
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

STAYS = (
    "{0} was {1}, and would stay, since .snakemake, which records how files were made, has no record of it; put "
    ".snakemake back, give the run another name, add --forcerun {0} to make it and all that follows again, or make all "
    "files of the run again with --forceall"
)


def refuse_kept(call: SnakemakeCall) -> None:
    """Refuses to start if a file would wrongly stay; see `kept`."""
    if said := kept(call):
        raise UserError(said)


def kept(call: SnakemakeCall) -> str | None:
    """The error message if a file would stay that does not match the configuration, the functions or a model."""
    outputs = call.outputs()
    replaced = (run_sources.replaced(folder) for folder in call.assets() if str(folder) not in outputs)
    return (
        _made_with_other_keys(call)
        or call.functions.kept(call.workflow)
        or next(filter(None, replaced), None)
        or _without_assets(call)
        or replaced_rewards.replaced(call)
    )


def _without_assets(call: SnakemakeCall) -> str | None:
    """The error message if prompts would stay although the assets, which identify a run's local files, are missing."""
    dag = call.workflow.dag
    for job in dag.jobs:
        if stage_of(job.rule) != "stage-assets" or dag.needrun(job) or Path(job.output[0]).exists():
            continue
        stays = any(Path(file).exists() for other in dag.depending[job] for file in other.output)
        if stays and (files := run_sources.local_files(call.runs.of(job.wildcards))):
            return (
                f"{job.output[0]} is missing. It records which files the run began with, so {files[0]} cannot be "
                f"checked: put it back, or add --forcerun {job.output[0]} to begin again"
            )
    return None


def ask_about_functions(call: SnakemakeCall) -> None:
    """Ends the call if the user has to choose what to do with edited functions; see `EditedFunctions.ask`."""
    call.functions.ask(call.workflow)


def settle_functions(call: SnakemakeCall) -> None:
    """Copies the user's functions, unless the user has to choose first; see `EditedFunctions.settle`."""
    call.functions.settle(call.workflow)
    if call.functions.keeps and (notice := call.functions.notice()):
        logger.info(notice)


def _made_with_other_keys(call: SnakemakeCall) -> str | None:
    """The error message if a file would stay that was made with a different value of a key that decides it."""
    if RerunTrigger.PARAMS not in call.workflow.rerun_triggers:  # with --rerun-triggers, keys do not count
        return None
    for run, files in _without_record(call.workflow, call.runs).items():
        now = call.runs.by_folder[run]
        earlier = _written(call.run_folder(run)) or now
        for stage, outputs in files.items():
            old, new = _decides(earlier, stage), _decides(now, stage)
            if key := next((key for key in old | new if old.get(key) != new.get(key)), None):
                return STAYS.format(outputs[0], f"made with another value of {key}")
            with suppress(ImportError):  # a controller without pyarrow
                # a call that ended early has written its configuration, but not yet these tables
                for file in outputs:
                    if other := lineage.other_key(now, Path(file)):
                        return STAYS.format(file, other)
    return None


def missing(call: SnakemakeCall) -> str | None:
    """The error message if a finished run lacks a file that the user wants, although Snakemake no longer needs it.

    It is None if a module or --until asks for only part of the run.
    """
    for run, config in call.runs.configs.items():
        if call.workflow.dag_settings.targets or not run_files.is_finished(call.run_folder(run), config):
            continue
        folder = call.run_folder(run)
        evaluations = [folder / "evaluation" / name / "completions.parquet" for name in config.evaluated]
        for file in (policy_folder(folder, 0), policy_folder(folder, config.rounds), *evaluations):
            if not file.exists():
                rounds = ", with all rounds, since states between them are not kept" if config.rounds else ""
                return (
                    f"{file} is missing, and since the run is finished, nothing would make it again: put it back, or "
                    f"make it again{rounds if file not in evaluations else ''}: {typed_command()} -- {file}"
                )
    return None


def missing_tables(call: SnakemakeCall) -> str | None:
    """A message about tables that were deleted from finished runs; None if the user asks for only part of a run."""
    if call.workflow.dag_settings.targets:
        return None
    jobs = (job for job in call.workflow.dag.jobs if stage_of(job.rule) in STAGES)
    makers = {str(file): job for job in jobs for file in job.output}
    lost = sorted(file for file in makers if file.endswith(".parquet") and not Path(file).exists())
    if not lost:
        return None
    trains = _trains(lost[0], makers)
    rounds = ", which trains rounds again, with all before them, since states between them are not kept"
    return (
        f"{counted(len(lost), 'table')} of finished jobs, such as {lost[0]}, cannot be found; nothing left to do needs "
        "them, so they are not made again before a job does, such as a new report. If you want one"
        f"{rounds if trains else ''}: {typed_command()} -- {lost[0]}"
    )


def _trains(lost: str, makers: Mapping[str, Any]) -> bool:
    """True if making a lost file would train a round: an update writes the file, or a lost file that it needs."""
    needed = [lost]
    for file in needed:
        if job := makers.get(file):
            if stage_of(job.rule) == "update":
                return True
            needed += (str(other) for other in job.input if not Path(other).exists() and other not in needed)
    return False


def ignore_damaged_records(persistence: Any) -> None:
    """Makes Snakemake treat a record that is not a JSON object as missing, where it would end with a traceback.

    Args:
        persistence: Snakemake's persistence object in this process.
    """
    read = getattr(persistence, "_io_read", None)
    if read is None:  # a Snakemake that keeps its records in a database
        return

    def read_or_ignore(subject: str, id: str) -> Any:
        try:
            record = read(subject, id)
        except ValueError:  # the record is not UTF-8
            record = None
        if isinstance(record, dict):
            return record
        logger.warning(f"Ignored a damaged record of how {id} was made: {persistence._record_path(subject, id)}")
        return {}

    persistence._io_read = read_or_ignore


def _without_record(workflow: Any, runs: RunSet) -> dict[str, dict[str, list[str]]]:
    """Run → stage → the files of that stage that stay and that Snakemake has no record of, in the order in which a run
    makes them.
    """
    files: dict[str, dict[str, list[str]]] = {}
    dag = workflow.dag
    for job in dag.jobs:
        stage = stage_of(job.rule)
        if stage in STAGES and dag.reason(job).no_metadata and not dag.needrun(job):
            run = getattr(job.wildcards, "run", runs.name)
            files.setdefault(run, {}).setdefault(stage, []).extend(map(str, job.output))
    return {
        run: {stage: sorted(stages[stage]) for stage in STAGES if stage in stages}
        for run, stages in files.items()
        if run in runs.by_folder
    }


def _written(run: Path) -> Config | None:
    try:
        return run_files.read_config(run)
    except UserError:
        return None


def _decides(config: Config, stage: str) -> JSON:
    """The values that decide a stage, by key. For rollouts, these include the lag."""
    lag = {"rollout.lag": config.rollout.lag} if stage == "rollout" else {}
    return flatten(config.params(stage)) | lag
