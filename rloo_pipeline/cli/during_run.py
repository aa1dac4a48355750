"""Commands during a run: run, why, watch, diagnose, and submit, status, cancel for a run that is one SLURM job."""

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Any

from rloo_pipeline.cli.command import CONFIGURATION, RUN, Command, command, option, positive
from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_set import runs_of
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import installation


def _snakemake(name: str, about: str, *options: str) -> Command:
    """Makes a command that calls Snakemake with the user's options and these."""

    def run(arguments: argparse.Namespace) -> None:
        from rloo_pipeline.commands import launch

        words = arguments.unparsed
        end = words.index("--") if "--" in words else len(words)  # targets follow
        launch.become_snakemake([*words[:end], *options, *words[end:]])

    return Command(name, run, about, (), passes_on=True)


def _submit(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.before_run import exchange, slurm_checks
    from rloo_pipeline.cluster import allocation, submission
    from rloo_pipeline.snakemake_ext import edited_functions, failures, run_folders

    project = Path.cwd()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-C", nargs="*", action="extend", default=[])
    named, others = parser.parse_known_args(arguments.unparsed)
    file = arguments.configuration
    raw = read_mapping(file, [*arguments.config, *named.config])
    runs = runs_of(raw, file, str(file))
    folder = project / "results" / runs.name / submission.FOLDER
    submission.refuse_second(runs.name, folder)
    options = dict(_sbatch_option(text) for text in arguments.sbatch)
    slurm_checks.refuse_too_long({"time": arguments.time} | submission.defaults() | options)
    for config in runs.configs.values():
        exchange.refuse(config, arguments.nodes, arguments.controller)
    # the job may start or restart after the user has edited the files for another run
    edited_functions.EditedFunctions(runs, folder.parent).settle()
    copy = run_folders.freeze_config(raw, runs, file, folder)
    name = arguments.profile or ("slurm" if arguments.controller else "allocation")
    argv = [*installation.snakefile_option(project), "--configfile", str(copy)]
    argv += ["--profile", installation.profile(name)]
    if not arguments.controller:
        argv += ["--cores", str(arguments.cpus_per_node * arguments.nodes)]
    margin = None if arguments.stop_before is None else arguments.stop_before * 60
    plan = allocation.Plan([*argv, *others], project, folder, arguments.controller, margin)
    request = submission.Resources(
        arguments.time,
        arguments.nodes,
        arguments.gpus_per_node,
        arguments.cpus_per_node,
        options,
    )
    os.environ[failures.COMMAND] = shlex.join(["rloo", *arguments.argv])
    number = submission.submit(runs.name, plan, request)
    print(f"job {number}; `rloo status {runs.name}` shows its progress")


def _sbatch_option(text: str) -> tuple[str, Any]:
    """Parses an sbatch option into name and value; the value is True if none is given."""
    match = re.fullmatch(r"(?:--)?([a-z][a-z-]*)(?:=(.*))?", text)
    if not match:
        raise UserError(f"--sbatch {text}: write it as KEY=VALUE, such as partition=gpu")
    if match[1] in ("array", "error", "output", "parsable", "test-only", "wait"):
        raise UserError(f"--sbatch {text}: leave it out; a run is one job, and its log is in its folder")
    return match[1], True if match[2] is None else match[2]


def _status(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import submission

    records = sorted(Path("results").glob(f"*/{submission.FOLDER}/{submission.RECORD}"))
    runs = [_run_folder(arguments.run)] if arguments.run else [path.parents[2] for path in records]
    if not runs:
        print("no run was submitted from this folder")
    for run in runs:
        for line in submission.status(run):
            print(line)


def _cancel(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import submission

    print(submission.cancel(_run_folder(arguments.run)))


def _run_folder(run: str) -> Path:
    """The folder of a run, given by its name or folder."""
    return Path(run) if Path(run).is_dir() else Path("results") / run


COMMANDS = (
    _snakemake(
        "run",
        "Start or continue a run: `rloo run [CONFIG] [OPTION …]` is `snakemake` with the Snakefile of this folder, "
        "else of this package, on all cores, with any options of Snakemake.",
    ),
    _snakemake(
        "why",
        "Show what `rloo run` with the same arguments would run, why, and how long it took last time.",
        "--dry-run",
    ),
    _snakemake(
        "adopt",
        "Accept the files of a copied run as up to date, after checking their content: `rloo adopt [CONFIG]`.",
        "--touch",
    ),
    command(
        "watch",
        "rloo_pipeline.commands.watch:watch",
        "Show the progress of a run, even before it begins, or the curves of several. Only reads files.",
        option("runs", type=Path, metavar="RUN", nargs="*", help="folders or names (default: the project's run)"),
        option("--once", action="store_true", help="print the view once and exit"),
        option("--every", type=positive, default=3.0, help="refresh interval in seconds"),
    ),
    command(
        "diagnose", "rloo_pipeline.commands.watch:diagnose", "List the symptoms of a run, finished or running.", RUN
    ),
    command(
        "submit",
        _submit,
        "Submit a whole run as one SLURM job, which requeues itself until the run is finished. "
        "Arguments after `--` go to Snakemake: -- --sdm apptainer",
        *CONFIGURATION,
        option(
            "--controller", action="store_true", help="run only Snakemake in this job, and each stage as its own job"
        ),
        option("--profile", help="Snakemake profile (default: allocation, or slurm with --controller)"),
        option("--time", required=True, help="time limit of the job, in sbatch's format: 12:00:00"),
        option(
            "--stop-before",
            type=positive,
            metavar="MINUTES",
            help="start no new stage in this many minutes before the time limit (default: a tenth of it)",
        ),
        option("--nodes", type=int, default=1, help="number of nodes"),
        option("--gpus-per-node", type=int, default=0, help="GPUs per node"),
        option("--cpus-per-node", type=int, default=1, help="CPUs per node"),
        option(
            "--sbatch",
            action="append",
            default=[],
            metavar="KEY[=VALUE]",
            help="another option of sbatch, such as partition=gpu; can be repeated",
        ),
        passes_rest=True,
    ),
    command(
        "status",
        _status,
        "Show the progress of submitted runs.",
        option("run", nargs="?", help="name of the run, or its folder"),
    ),
    command(
        "cancel",
        _cancel,
        "Cancel a submitted run. Finished files are kept.",
        option("run", help="name of the run, or its folder"),
    ),
)
