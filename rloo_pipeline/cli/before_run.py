"""Commands before a run: check, plan, doctor, reward-test, profiles."""

from __future__ import annotations

import argparse
from pathlib import Path

from rloo_pipeline.cli.command import command, option
from rloo_pipeline.config.loading import ConfigArguments, reward_from_arguments

DEFAULT = Path("config/config.yaml")
CONFIGURATION = (
    option("configuration", type=Path, metavar="CONFIG", nargs="?", default=DEFAULT, help="YAML file"),
    option("--config", nargs="+", default=[], metavar="KEY=VALUE", help="keys to change, as for Snakemake"),
)


def _configuration(arguments: argparse.Namespace) -> ConfigArguments:
    return ConfigArguments(arguments.configuration, arguments.config)


def _check(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.check import check

    check(_configuration(arguments))


def _plan(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.plan import plan_run

    plan_run(_configuration(arguments).config, arguments.cluster_gpu)


def _doctor(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.doctor import doctor

    doctor(_configuration(arguments), Path(), arguments.profile, not arguments.no_image)


def _reward_test(arguments: argparse.Namespace) -> None:
    reward = reward_from_arguments(arguments.function, arguments.options, arguments.timeout, arguments.batch)
    from rloo_pipeline.commands.reward_test import Labels, reward_test

    labels = Labels(arguments.labels, arguments.threshold) if arguments.labels else None
    reward_test(reward, arguments.data, arguments.completions, arguments.workers, arguments.tokenizer, labels)


def _profiles(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import profiles

    for line in profiles.install(arguments.source):
        print(line)


COMMANDS = (
    command(
        "check",
        _check,
        "Check model, data and reward functions in seconds, before any engine starts.",
        *CONFIGURATION,
    ),
    command(
        "plan",
        _plan,
        "Estimate what a run needs: memory, jobs, tokens, disk, GPU-hours.",
        option("--cluster-gpu", metavar="NAME[:GB]", help="GPU model that the stages will use, such as h100:80"),
        *CONFIGURATION,
    ),
    command(
        "doctor",
        _doctor,
        "Check whether this node has what a run needs; works offline.",
        option("--profile", type=Path, help="folder of the Snakemake profile, such as profiles/slurm"),
        option("--no-image", action="store_true", help="stages run in this environment, without Apptainer"),
        *CONFIGURATION,
    ),
    command(
        "reward-test",
        _reward_test,
        "Try a reward function on rows of data, before a run.",
        option("function", metavar="FILE:FUNCTION", help="as in a configuration; or module:function"),
        option(
            "--data", type=Path, required=True, help="rows with the columns of the dataset: .jsonl, .json or .parquet"
        ),
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
        option(
            "--labels", metavar="COLUMN", help="column of the completions with true or false; reports the agreement"
        ),
        option("--threshold", type=float, default=1.0, help="score from which a completion counts as right"),
    ),
    command(
        "profiles",
        _profiles,
        "Link this project's profiles into the folder where `snakemake --profile` looks for them.",
        option("action", choices=["install"], help="what to do"),
        option("--source", type=Path, default=Path("profiles"), help="folder of the profiles"),
    ),
)
