"""Measures what a warm round costs beside its engines' work in one SLURM job, in the image, on one node and on two."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import whole

CONFIGURATION = ".test/config/config.yaml"
ROUNDS = 6


def in_a_job(_: int, folder: Path, __: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a round of the mini configuration in a SLURM job, in the image, that are neither sampling nor
    training. Needs a SLURM, such as that of `make cluster-up`, and the image.
    """
    if not whole.slurm_runs("nodes"):
        return {}
    figures = {}
    for nodes in (1, 2):
        changes = folder / "changes.yaml"
        changes.write_text(json.dumps({"rounds": ROUNDS, "workers": "always"}))  # YAML, too
        project = whole.Project(folder / str(nodes), "mini", "--configfile", CONFIGURATION, str(changes))
        for name in whole.PARTS:  # an image does not see what links lead to
            (project.folder / name).unlink()
            copy = shutil.copytree if (whole.ROOT / name).is_dir() else shutil.copyfile
            copy(whole.ROOT / name, project.folder / name)
        (project.folder / "images").symlink_to(whole.ROOT / "images")
        project.on_slurm(CONFIGURATION, ROUNDS, nodes, "--sdm=apptainer")
        figures[f"round_overhead_{nodes}_nodes_seconds"] = project.idle(ROUNDS)
    return figures
