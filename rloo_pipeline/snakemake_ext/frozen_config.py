"""The configuration as it was when a run started, in files of the run's own.

A SLURM job is a Snakemake of its own, which reads the configuration when the job starts; so does the call that finishes
a run after a gate, and each allocation of a run that is one job. Meanwhile the user may have edited the files for the
next run, so all of them read these copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rloo_pipeline.config.loading import is_experiment, read_mapping
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.snakemake_ext import run_folders

FOLDER = Path(".snakemake/rloo")


class _Dumper(yaml.SafeDumper):
    """Writes any kind of mapping; of a value that a Snakefile has put there and YAML does not know, its text."""


_Dumper.add_multi_representer(dict, yaml.SafeDumper.represent_dict)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_str(str(value)))


def write(raw: Mapping[str, Any], runs: RunSet, file: Path | None, folder: Path) -> Path | None:
    """Copies the configuration of a Snakemake call.

    Args:
        raw: its whole configuration, as Snakemake has it.
        runs: runs that the configuration describes.
        file: where it was read from; None if not known.
        folder: for the copy.

    Returns:
        The copy; None for an experiment in a part of the configuration, whose base is not found from elsewhere.
    """
    raw = {**raw, "functions": "keep"}  # freezes the functions too
    if runs.experiment:
        if not is_experiment(raw):
            return None
        base = Path(runs.experiment.base)
        copy = base.name if base.is_absolute() or ".." in base.parts else str(base)
        _write(folder / copy, read_mapping((file.parent if file else Path()) / base))
        raw = {**raw, "experiment": runs.name, "base": copy}
    _write(folder / "jobs.yaml", raw)
    return (folder / "jobs.yaml").absolute()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    run_folders.write_text(path, yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False))
