"""Prepares the folders of runs before the first job: writes configurations and links, and lists the files to make.

In an experiment, each run's folder has links in place of the files that runs share, so that code which reads a run
finds them. Rules use the shared files by their real paths.

Each SLURM job starts its own Snakemake process, which reads the configuration when the job starts. So do the call that
finishes a run after a gate, and each allocation of a run in one job. By then, the user may have edited the files for
another run, so all of these read copies (`freeze_config`).
"""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from snakemake.settings.types import ConfigSettings

from rloo_pipeline.artifacts import files
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import is_experiment, read_mapping, sealed
from rloo_pipeline.config.run_set import EXPERIMENT, GROUPS, RunSet, jobs_by_group
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.run_files import held_out_of, is_finished, metrics_of
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

FROZEN = Path(".snakemake/rloo")
"""Folder for copies of configurations, with a subfolder per run."""


def write_configs(call: SnakemakeCall) -> None:
    """Writes the configuration of each run; for an experiment, also its description and the links."""
    for run, config in call.runs.by_folder.items():
        write_config(call.run_folder(run), config)
    write_experiment(call.configured, call.results)


def freeze(call: SnakemakeCall) -> None:
    """Copies the configuration. From now on, jobs, and the call that finishes a run after a gate, read the copies."""
    file = next(iter(call.workflow.config_settings.configfiles), None)
    call.config_copy = freeze_config(call.workflow.config, call.runs, file, FROZEN / call.runs.name)
    if call.config_copy:
        call.workflow.config_settings = ConfigSettings(configfiles=[call.config_copy])


def mark_unfinished(call: SnakemakeCall) -> None:
    """Dates summaries that will be rewritten before all other files, since jobs will change their sources."""
    for run in call.to_finish():
        if (file := call.run_folder(run) / "summary.json").exists():
            copy = shutil.copyfile(file, file.with_name(".summary.json.old"))  # a colleague may own the file
            os.utime(copy, (1, 1))  # Snakemake takes 0 for no time, and would leave the report as it is
            copy.replace(file)


def is_summary_current(folder: Path) -> bool:
    """True for a finished run, unless a call has begun to make files of it again; see `mark_unfinished`."""
    file = folder / "summary.json"
    return file.exists() and file.stat().st_mtime > 1


def remove_lost_shards(call: SnakemakeCall) -> None:
    """Removes tables of shards that a run no longer has (`rollout.shards`) next to tables that are made again.
    Otherwise, code that reads all tables of a round, such as an update that retrains it, would include them.
    """
    shards = {call.run_folder(run): config.rollout.shards for run, config in call.runs.by_folder.items()}
    for folder in {Path(file).parent for file in call.outputs() if file.endswith(".parquet")}:
        count = next((shards[run] for run in folder.parents if run in shards), 1000)
        for file in folder.glob("[0-9][0-9][0-9].parquet"):
            if int(file.stem) >= count:
                file.unlink()


def write_config(folder: Path, config: Config, **changes: Any) -> None:
    """Writes the configuration that stages read, with all defaults. Touches the file only if it changes.

    Leaves out `functions`, which applies to a single start of the run.
    """
    _write_yaml(folder / "config.yaml", config.model_dump(mode="json", exclude={"functions"}) | changes)


def write_experiment(runs: RunSet, results: Path) -> None:
    """Writes the description of an experiment, and the links of its runs.

    Args:
        runs: runs as configured, including rounds that a gate has skipped.
        results: folder that contains the runs' folders.
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
    """Makes a relative link, replacing whatever was there."""
    path = os.path.relpath(target, link.parent)
    if link.is_symlink() and link.readlink() == Path(path):
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    with files.atomic_write(link) as temporary:
        try:
            temporary.symlink_to(path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise UserError(
                f"{link}: this file system has no symbolic links ({error.strerror}), but an experiment needs them; use "
                "another folder"
            ) from error


class _Dumper(yaml.SafeDumper):
    """Dumps any kind of mapping. Values from a Snakefile that YAML cannot represent are written as text."""


_Dumper.add_multi_representer(dict, yaml.SafeDumper.represent_dict)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))


def freeze_config(raw: Mapping[str, Any], runs: RunSet, file: Path | None, folder: Path) -> Path | None:
    """Copies the configuration of a Snakemake call.

    Args:
        raw: Snakemake's whole configuration.
        runs: runs that the configuration describes.
        file: file that it was read from; None if unknown.
        folder: folder for the copy.

    Returns:
        The copy; None for an experiment inside a larger configuration, whose base could not be found from the copy.
    """
    raw = {**raw, "functions": "keep"}  # this freezes the functions too
    if runs.experiment:
        if not is_experiment(raw):
            return None
        base = Path(runs.experiment.base)
        copy = base.name if base.is_absolute() or ".." in base.parts else str(base)
        _write_copy(folder / copy, read_mapping((file.parent if file else Path()) / base))
        raw = {**raw, "experiment": runs.name, "base": copy}
    own = folder / "rloo-jobs.yaml"  # a base keeps its name, such as jobs.yaml
    _write_copy(own, raw)
    return own.absolute()


def held_out_rounds(config: Config, run: Path, in_job: bool = False) -> list[int]:
    """Rounds with held-out accuracy: in an unfinished run, all that measure it; in a finished run, those that have it,
    or can count it again from their held-out tables. So finished runs sample and train nothing again for it, and killed
    runs measure missing rounds.

    Args:
        config: the run's configuration.
        run: folder of the run.
        in_job: True in a job on another machine. All its planned inputs already exist, and the summary no longer tells
            whether the run was finished when the job was planned.
    """
    rounds = range(1, config.rounds + 1)
    if config.held_out_each_round and not in_job and not is_finished(run, config):
        return list(rounds)
    return [n for n in rounds if held_out_of(run, n).exists() or _is_measurement_lost(config, run, n)]


def _is_measurement_lost(config: Config, run: Path, number: int) -> bool:
    """True if someone deleted the measurement of a round, but neither its events nor the tables that it came from."""
    folders = ("held_out", "scores/held_out")
    tables = [f"rounds/{number:05d}/{name}/{n:03d}.parquet" for name in folders for n in range(config.rollout.shards)]
    return all((run / file).exists() for file in (f"tensorboard/eval/{number:05d}.tfevents", *tables))


def page_rounds(config: Config, run: Path) -> list[int]:
    """Rounds after which a page is written. Rounds that are already finished get none; the last page is that of the
    finished run.
    """
    return [
        number
        for number in range(1, config.rounds)
        if page_of(run, number).exists() or (config.page_is_due(number) and not metrics_of(run, number).exists())
    ]


def page_of(run: Path, number: int) -> Path:
    """Path of the file that records that a page was written after a round."""
    return run / "pages" / f"{number:05d}.json"


def _write_copy(path: Path, content: Mapping[str, Any]) -> None:
    _write_text(path, yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False))


def _write_yaml(path: Path, content: Any) -> None:
    _write_text(path, sealed(yaml.safe_dump(content, sort_keys=False)))


def _write_text(path: Path, text: str) -> None:
    """Writes a file; touches it only if its content changes."""
    if not path.exists() or path.read_text() != text:
        files.write_text(path, text)
