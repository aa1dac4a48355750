"""Commands before a run: init, check, plan, doctor, reward-test, images, profiles."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rloo_pipeline.cli.command import CONFIGURATION, command, count, option
from rloo_pipeline.config import Scoring
from rloo_pipeline.config.error_messages import checked
from rloo_pipeline.config.loading import ConfigArguments, reward_from_arguments
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import installation

QUEUE_WAIT = 10.0
"""Minutes that `rloo plan` assumes a SLURM job waits in the queue."""


def _configuration(arguments: argparse.Namespace) -> ConfigArguments:
    return ConfigArguments(arguments.configuration, arguments.config)


def _check(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.check import check

    check(_configuration(arguments))


def _plan(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.plan import plan

    runs = read_runs(arguments.configuration, tuple(arguments.config))
    plan(runs, arguments.cluster_gpu, _queue_wait(arguments.profile, arguments.wait), arguments.gpus)


def _queue_wait(profile: str | None, minutes: float | None) -> float | None:
    """Minutes that a SLURM job waits; None unless the profile is for SLURM.

    Raises:
        UserError: the profile is for another executor, or the wait is negative.
    """
    from rloo_pipeline.before_run.slurm_checks import read_profile

    if profile is None:
        if minutes is not None:
            raise UserError("--wait is for SLURM; name the profile too, such as --profile slurm")
        return None
    folder = Path(installation.profile(profile))
    if read_profile(folder).get("executor") != "rloo-slurm":
        raise UserError(f"--profile {profile}: {folder} does not run on SLURM; name one that does, such as slurm")
    if minutes is not None and not 0 <= minutes < float("inf"):
        raise UserError(f"--wait {minutes:g}: not a wait in the queue; give the minutes, 0 or more")
    return QUEUE_WAIT if minutes is None else minutes


def _doctor(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.doctor import doctor

    profile = arguments.profile and Path(installation.profile(arguments.profile))
    doctor(_configuration(arguments), installation.root(), profile, not arguments.no_image)


def _reward_test(arguments: argparse.Namespace) -> None:
    reward = reward_from_arguments(arguments.function, arguments.options, arguments.timeout, arguments.batch)
    from rloo_pipeline.commands.reward_test import reward_test

    workers = checked(Scoring, {"workers": arguments.workers}, "command line").workers
    reward_test(reward, arguments.data, arguments.completions, workers, arguments.tokenizer)


def _init(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.init import init, init_from_trl

    names = ("data", "reward", "held_out", "prompt", "answer")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.from_trl is None:
        init(arguments.folder, arguments.force, model=arguments.model, **given)
        return
    if given:
        first = next(iter(given)).replace("_", "-")
        raise UserError(f"--{first}: the script sets it; leave it out here, and edit config/config.yaml")
    init_from_trl(arguments.folder, arguments.from_trl, arguments.model, arguments.force)


def _images(arguments: argparse.Namespace) -> None:
    build = installation.root() / "containers" / "build"
    environment = {"IMAGES": str(Path("images").absolute()), "PYTHON": sys.executable, **os.environ}
    if subprocess.run(["sh", str(build), arguments.kind], env=environment, check=False).returncode:
        raise UserError(f"no image {arguments.kind} was built, see above")


def _profiles(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import profiles

    own = Path("profiles")
    source = arguments.source or (own if own.is_dir() else installation.root() / own)
    for line in profiles.install(source):
        print(line)


COMMANDS = (
    command(
        "init",
        _init,
        "Make a project with configuration, reward function and its test, Snakefile and profiles. Asks for what is "
        "not given.",
        option("folder", type=Path, nargs="?", default=Path(), help="project folder to create"),
        option("--model", help="folder of a model, or a Hub id"),
        option(
            "--data", help="rows (.jsonl, .json, .csv, .tsv, .parquet), a folder with train and test files, or a Hub id"
        ),
        option("--reward", metavar="FILE:FUNCTION", help="your reward function (default: one is written)"),
        option("--held-out", metavar="FILE", help="held-out rows (default: a fifth of the data, at most 500)"),
        option("--prompt", metavar="COLUMN", help="column with the question"),
        option("--answer", metavar="COLUMN", help="column with the right answer"),
        option(
            "--from-trl",
            metavar="SCRIPT",
            help="a TRL training script, which is read but not run, or a TRL command, in quotes with its options: "
            "--from-trl 'grpo.py --beta 0.1', --from-trl 'trl grpo --config grpo.yaml'",
        ),
        option("--force", action="store_true", help="replace existing files"),
    ),
    command(
        "check", _check, "Check model, data and reward functions in seconds, before any engine starts.", *CONFIGURATION
    ),
    command(
        "plan",
        _plan,
        "Estimate what a run needs: memory, jobs, tokens, disk, hours, GPU-hours, time in SLURM's queue.",
        option("--gpus", type=count, metavar="N", help="print the best settings for N GPUs, and alternatives"),
        option("--cluster-gpu", "--gpu", metavar="NAME[:GB]", help="GPU model, such as h100:80"),
        option(
            "--profile", help="SLURM profile, such as slurm; adds jobs, time in the queue, and advice on how to run"
        ),
        option("--wait", type=float, metavar="MINUTES", help=f"a job's wait in SLURM's queue; default {QUEUE_WAIT:g}"),
        *CONFIGURATION,
    ),
    command(
        "doctor",
        _doctor,
        "Check whether this node has what a run needs; works offline.",
        option("--profile", help="the Snakemake profile, such as slurm, or its folder"),
        option("--no-image", action="store_true", help="for stages that run in this environment, without Apptainer"),
        *CONFIGURATION,
    ),
    command(
        "reward-test",
        _reward_test,
        "Try a reward function on rows of data, before a run.",
        option("function", metavar="FILE:FUNCTION", help="reward function as in a configuration, or module:function"),
        option("--data", type=Path, required=True, help="rows of the dataset as .jsonl, .json, .csv, .tsv or .parquet"),
        option(
            "--completions",
            type=Path,
            help="file with a column `completion` (and `completion_ids`, if the function needs them), with the same "
            "number of consecutive rows for each row of the data; without it the column `completion` or `answer` of "
            "the data is scored",
        ),
        option(
            "--tokenizer",
            help="folder of a policy, for functions on token ids: makes `completion_ids` if the file has none",
        ),
        option("--options", default="{}", help="extra keyword arguments of the function, as JSON"),
        option("--workers", type=int, default=1, help="number of processes"),
        option("--timeout", type=float, default=60.0, help="time limit per row, in seconds"),
        option("--batch", choices=["rows", "group", "all"], default="rows", help="as the key of a reward"),
    ),
    command(
        "images",
        _images,
        "Build the container image of the stages into images/.",
        option(
            "kind", choices=["cpu", "cuda", "sandbox"], help="sandbox: the image in which code_reward runs programs"
        ),
    ),
    command(
        "profiles",
        _profiles,
        "Link this project's profiles into the folder where `snakemake --profile` looks for them.",
        option("action", choices=["install"], help="what to do"),
        option(
            "--source", type=Path, help="folder of the profiles (default: profiles/, or else those of this package)"
        ),
    ),
)
