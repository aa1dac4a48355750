"""The commands for a run that is one SLURM job: `rloo submit`, `rloo status` and `rloo cancel`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import UserError

WITHOUT_CONFIG = ("submit", "status", "cancel")

AddCommand = Callable[..., argparse.ArgumentParser]
PLACEMENTS = {False: "allocation", True: "slurm"}


def add_commands(add: AddCommand) -> None:
    """Adds the three to the parser; `add` makes a command of a name, a function and a sentence."""
    submit = add("submit", _submit, "Put a whole run into one SLURM job, which requeues itself until the run is done.")
    submit.add_argument("--config", type=Path, default=Path("config/config.yaml"), help="the run's configuration")
    submit.add_argument("--controller", action="store_true", help="only Snakemake is in the job, each stage is its own")
    submit.add_argument("--profile", help="profile of Snakemake: allocation, or slurm with --controller")
    submit.add_argument("--time", required=True, help="time limit of an allocation, as sbatch takes it: 12:00:00")
    submit.add_argument(
        "--stop-before", type=float, metavar="MINUTES", help="start nothing more so long before its end; a tenth of it"
    )
    submit.add_argument("--nodes", type=int, default=1, help="nodes")
    submit.add_argument("--gpus-per-node", type=int, default=0, help="GPUs of each node")
    submit.add_argument("--cpus-per-node", type=int, default=1, help="CPUs of each node")
    submit.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY[=VALUE]", help="another option of sbatch: partition=gpu"
    )
    submit.add_argument("snakemake", nargs="*", metavar="-- WORD", help="for Snakemake: -- --sdm apptainer")
    for name, command, about in (
        ("status", _status, "Say how far submitted runs are."),
        ("cancel", _cancel, "End a submitted run; what is finished stays."),
    ):
        sub = add(name, command, about)
        sub.add_argument("run", nargs="?" if name == "status" else None, help="name of the run, or its folder")


def _submit(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import allocation, submission

    project = Path.cwd()
    if not (project / "Snakefile").exists():
        raise UserError(f"{project}: no Snakefile here; call it in the project's folder")
    config = load(arguments.config)
    name = arguments.profile or PLACEMENTS[arguments.controller]
    profile = next((str(folder) for folder in (Path("profiles") / name, Path(name)) if folder.is_dir()), name)
    words = ["--configfile", str(arguments.config), "--profile", profile]
    if not arguments.controller:
        words += ["--cores", str(arguments.cpus_per_node * arguments.nodes)]
    margin = None if arguments.stop_before is None else arguments.stop_before * 60
    folder = project / "results" / config.run / submission.FOLDER
    plan = allocation.Plan([*words, *arguments.snakemake], project, folder, arguments.controller, margin)
    request = submission.Resources(
        arguments.time,
        arguments.nodes,
        arguments.gpus_per_node,
        arguments.cpus_per_node,
        dict(_option(word) for word in arguments.sbatch),
    )
    number = submission.submit(config, plan, request)
    print(f"job {number}; `rloo status {config.run}` says how far it is")


def _option(word: str) -> tuple[str, Any]:
    """An option of sbatch and its value; True where it has none."""
    found = re.fullmatch(r"(?:--)?([a-z][a-z-]*)(?:=(.*))?", word)
    if not found:
        raise UserError(f"--sbatch {word}: write it as KEY=VALUE, such as partition=gpu")
    return found[1], True if found[2] is None else found[2]


def _status(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import submission

    records = sorted(Path("results").glob(f"*/{submission.FOLDER}/{submission.RECORD}"))
    runs = [_folder(arguments.run)] if arguments.run else [path.parents[2] for path in records]
    if not runs:
        print("no run was submitted from here")
    for run in runs:
        for line in submission.status(run):
            print(line)


def _cancel(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import submission

    print(submission.cancel(_folder(arguments.run)))


def _folder(run: str) -> Path:
    """The folder of a run that is given by its name or its folder."""
    return Path(run) if Path(run).is_dir() else Path("results") / run
