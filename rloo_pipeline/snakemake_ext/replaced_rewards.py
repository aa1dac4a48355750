"""Finds reward models that were replaced in their folders after a run scored with them.

Snakemake sees the name of the folder and not what is in it, so the run would go on with scores of two models.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rloo_pipeline.artifacts import lineage, reward_models
from rloo_pipeline.artifacts.assets import files_of_source
from rloo_pipeline.snakemake_ext.failures import stage_of
from rloo_pipeline.snakemake_ext.run_sources import placed
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall

SCORES = ("score", "refill", "evaluate")
"""Stages whose tables name the reward models that scored them."""


def replaced(call: SnakemakeCall) -> str | None:
    """The error message if a table would stay that a reward model scored before it was replaced.

    A table is only read if a file of the model has changed since. Tables of other machines' models are not checked.
    """
    for run, config in call.runs.by_folder.items():
        for column, folder in reward_models.folders_of(config.rewards).items():
            with suppress(OSError, ValueError, KeyError, ImportError):  # a controller may lack packages
                changed = _changed(folder)
                older = [(time, file) for file in _kept(call, run) if (time := file.stat().st_mtime) < changed]
                named = ((file, _versions(file)) for _, file in sorted(older, reverse=True))
                file, versions = next((one for one in named if column in one[1]), (None, {}))
                if file and versions[column] != reward_models.version_of(folder)[1]:
                    return (
                        f"{folder} was replaced after {file} was scored with it, and nothing would run again for it: "
                        "put the old model back, or give the run another name"
                    )
    return None


def _versions(file: Path) -> dict[str, str]:
    """The reward models that scored a table, by column; empty for tables of earlier releases."""
    facts = lineage.facts_of(file)
    models, files = (json.loads(facts.get(key, "{}")) for key in (lineage.REWARD_MODELS, lineage.REWARD_FILES))
    return {**models, **files}


def _changed(folder: Path) -> float:
    """Time at which a file of a model was last written or renamed, or its folder put in its place."""
    top, names = files_of_source(folder)
    return max([placed(folder), *((top / name).stat().st_ctime for name in names)])


def _kept(call: SnakemakeCall, run: str) -> Iterator[Path]:
    """Yields the tables of a run's scores that this call does not write."""
    dag = call.workflow.dag
    for job in dag.jobs:
        if stage_of(job.rule) in SCORES and getattr(job.wildcards, "run", run) == run and not dag.needrun(job):
            tables = (Path(file) for file in job.output if file.endswith(".parquet"))
            yield from filter(Path.exists, tables)
