"""`rloo adopt`: accepts the files of a copied or moved run as they are, after checking their content.

A copy has different modification times than the run, and often no .snakemake, so Snakemake would make all files again
or have no records of them. Snakemake's option `--touch` gives them new times in the right order and records how they
were made. This module first checks their content: every digest, and that the files belong together. The next call makes
missing files.
"""

import os
from collections.abc import Container, Iterator
from pathlib import Path

from rloo_pipeline.artifacts.manifest import MANIFEST
from rloo_pipeline.config import STAGES, Config, flatten
from rloo_pipeline.errors import UserError, counted
from rloo_pipeline.judging import run_files
from rloo_pipeline.snakemake_ext import run_sources
from rloo_pipeline.snakemake_ext.dry_run import newer_inputs
from rloo_pipeline.snakemake_ext.run_folders import is_summary_current
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

MOST_ROUNDED = 2.0
"""Seconds; file systems and archives with coarse times keep every second one."""


def take_all(call: SnakemakeCall) -> None:
    """With `--touch`, makes Snakemake also record how files whose times are in order were made, and keep temporary
    policies, since it counts the jobs that still need them as done.
    """
    if _touches(call):
        call.workflow.dag.forcerules.update(call.workflow.dag.rules)
        call.workflow.storage_settings.notemp = True


def check(call: SnakemakeCall) -> None:
    """With `--touch`, checks all files of the runs.

    Raises:
        UserError: no run is there, a file is damaged or belongs to another run, or a run was made with a different
            configuration.
    """
    if not _touches(call):
        return
    made = {Path(file).resolve() for file in call.outputs()}
    folders = {call.run_folder(run): config for run, config in call.runs.by_folder.items()}
    begun = {folder: config for folder, config in folders.items() if (folder / "config.yaml").exists()}
    if not begun:
        raise UserError(f"{min(folders)}: no run to adopt; copy its folder there first")
    for folder, config in begun.items():
        _check_config(folder, config)
        check_files(folder, config, made)
        accept_sources(folder / "assets")


def refuse_copy(call: SnakemakeCall) -> None:
    """Refuses to replace files of a finished run only because of their times, which a copy may have lost.

    In a run that was not copied, the summary has the time that Snakemake recorded. Files are newer there because an
    earlier call remade a part (a target, `--until`) or someone touched them, and all that follows is to be made again.

    Raises:
        UserError: a file of a finished run is newer than files that were made from it.
    """
    folders = {call.run_folder(run): [run, *call.runs.homes.get(run, {}).values()] for run in call.runs.configs}
    finished = [folder for folder in folders if is_summary_current(folder) and not _is_summary_recorded(call, folder)]
    if not finished or _touches(call):
        return
    reasons = [call.workflow.dag.reason(job) for job in call.workflow.dag.needrun_jobs()]
    newer = [min(newer_inputs(reason), default="") for reason in reasons if not reason.forced]
    for folder in finished:
        own = [call.run_folder(each) for each in folders[folder]]  # the run's files, and those that it shares
        if again := [file for file in newer if any(map(Path(file).is_relative_to, own))]:
            raise UserError(
                f"{folder} is finished, but {again[0]} is newer than what was made from it, so "
                f"{counted(len(again), 'job')} and all that follows would run again; `rloo adopt` with the same "
                "configuration accepts the files, such as those of a copy without times; --forceall makes all again"
            )


def _is_summary_recorded(call: SnakemakeCall, folder: Path) -> bool:
    """True if a run's summary has the time that Snakemake recorded, up to what a file system rounds."""
    file = folder / "summary.json"
    record = call.workflow.persistence._read_record(str(file))
    return bool(record and record.endtime) and abs(file.stat().st_mtime - record.endtime) <= MOST_ROUNDED


def _touches(call: SnakemakeCall) -> bool:
    plugin = call.workflow.executor_plugin  # None where nothing runs, as with --rulegraph
    return plugin is not None and plugin.name == "touch"


def _check_config(folder: Path, config: Config) -> None:
    earlier = run_files.read_config(folder)
    for stage in STAGES:
        before, now = flatten(earlier.params(stage)), flatten(config.params(stage))
        if key := next((key for key in before if before[key] != now.get(key)), None):
            raise UserError(
                f"{folder} was made with {key}: {before[key]}, but the configuration now has {now.get(key)}; adopt it "
                f"with {folder / 'config.yaml'} as its configuration, and change keys afterwards"
            )


def check_files(folder: Path, config: Config, made: Container[Path]) -> None:
    """Checks the files of one run.

    Args:
        folder: folder of the run.
        config: its configuration.
        made: outputs of the run's jobs. Other tables are left over from keys that the run has had before, and no stage
            reads them.

    Raises:
        UserError: a file is damaged, belongs to another run, or was made with a different configuration.
    """
    from rloo_pipeline.artifacts import files, lineage, manifest, model_files, node_files, tables
    from rloo_pipeline.artifacts.policy import Policy

    checked = [path for path in _artifacts(folder) if _counts(path, made)]
    for path in checked:
        if path.name == MANIFEST:
            if not all(link.exists() for link in node_files.links(path.parent)):
                continue  # weights on a node's own disk: the next call restores and checks them
            manifest.verify_manifest(path.parent)
            if path.parent.parent.name == model_files.POLICIES:
                number = int(path.parent.name)
                files.check_facts(path, {"policy": Policy(path.parent).digest}, lineage.named_policy(folder, number))
        elif path.suffix == ".parquet":
            tables.read(path, lineage.facts_of(path).get("kind", "a table"))
        elif path.name == "metrics.json":
            run_files.read_metrics(folder, int(path.parent.name))
        else:
            files.read_json(path)
    own = [path.parent if path.name == MANIFEST else path for path in checked]
    lineage.require_own(config.seed, own)
    lineage.require_configured(config, own)
    for path in checked:
        if (made_from := _made_from(path.relative_to(folder).parts, config)) is not None:
            facts = files.read_artifact(path) if path.suffix == ".json" else lineage.facts_of(path)
            files.check_facts(path, facts, lineage.named_policy(folder, made_from))
    for scores in (path for path in checked if path.parent.name in ("scores", "reference", "teacher")):
        rollouts = scores.parent.parent / "rollouts" / scores.name
        if rollouts.exists():
            written = lineage.facts_of(rollouts)[tables.DIGEST].removeprefix(tables.MARK.decode())
            files.check_facts(scores, lineage.facts_of(scores), {"rollouts": written})


def _counts(path: Path, made: Container[Path]) -> bool:
    """True if a run may read a file: it is the manifest of a policy, a state, assets or prompts, or a job makes it."""
    if path.name != MANIFEST:
        return path.resolve() in made
    return path.parent.parent.name != "reward_model" or path.parent.resolve() in made


def _made_from(parts: tuple[str, ...], config: Config) -> int | None:
    """Number of the policy that a file with this path in the run was made from; None for other files."""
    match parts:
        case "rounds", number, "rollouts" | "held_out", _:
            return config.rollout.policy_of(int(number))
        case "evaluation", name, "summary.json":
            return config.evaluated.get(name)
    return None


def accept_sources(folder: Path) -> None:
    """Checks local models and data named in `folder`, the assets of a run, as far as they are here, and makes
    assets.json newer than them, since they may have been copied after it.

    Raises:
        UserError: one of them differs from the one that the run began with.
    """
    from rloo_pipeline.artifacts import assets

    if (folder / assets.ASSETS).exists():
        sources = run_sources.recorded(folder)
        assets.read(folder, *(name for name, source in sources.items() if Path(source["path"]).exists()))
        os.utime(folder / assets.ASSETS)
        assets.make_newest(folder, sources)


def _artifacts(folder: Path) -> Iterator[Path]:
    """Yields the files of a run that have a digest. In a run of an experiment, links lead to shared files."""
    for room in ("assets", "prompts", "policies", "trainer"):
        yield from sorted(folder.glob(f"{room}/manifest.json")) + sorted(folder.glob(f"{room}/[0-9]*/manifest.json"))
    for room in ("warmstart", "reward_model", "rounds", "evaluation", "test", "harness"):
        for path in sorted(folder.glob(f"{room}/**/*")):
            if path.suffix in (".parquet", ".json") and not path.name.startswith("."):
                yield path
    yield from filter(Path.exists, (folder / name for name in ("judgements.parquet", "selection.json")))
