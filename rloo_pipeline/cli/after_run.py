"""Commands after a run: compare, experiment, export, rescore, track."""

import argparse
from pathlib import Path

from rloo_pipeline.cli.command import CONFIG, RUN, command, option
from rloo_pipeline.config.loading import load, load_rewards
from rloo_pipeline.trackers.trackers import TRACKERS


def _export(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.export import export
    from rloo_pipeline.judging import run_files

    config = load(arguments.config) if arguments.config else run_files.read_config(arguments.run)
    export(config, arguments.run, arguments.output, arguments.merge, arguments.policy)


def _rescore(arguments: argparse.Namespace) -> None:
    changes = [] if arguments.workers is None else [f"scoring={{workers: {arguments.workers}}}"]
    config = load(arguments.config or arguments.run / "config.yaml", changes)
    rewards = load_rewards(arguments.rewards, config)
    from rloo_pipeline.commands.rescore import rescore

    rescore(config, arguments.run, rewards, arguments.output)


COMMANDS = (
    command(
        "compare",
        "rloo_pipeline.commands.compare:compare",
        "Compare finished runs on one page.",
        option(
            "--output",
            dest="html",
            metavar="OUTPUT",
            type=Path,
            default=Path("comparison.html"),
            help="HTML file to write (default: comparison.html)",
        ),
        option("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="folder of a finished run"),
        option("--summary", type=Path, help="JSON file for the data of the page"),
    ),
    command(
        "experiment",
        "rloo_pipeline.commands.compare:experiment",
        "Write the page and the tables of an experiment from its finished runs.",
        option("folder", type=Path, metavar="EXPERIMENT", help="folder of the experiment, results/<experiment>"),
    ),
    command(
        "export",
        _export,
        "Write a policy of a run to a standalone folder; an adapter can be merged into its base.",
        CONFIG,
        RUN,
        option("--out", dest="output", type=Path, required=True, help="folder to write"),
        option("--merge", action="store_true", help="add an adapter to the weights of its base"),
        option("--policy", type=int, help="number of the policy (default: the last one)"),
    ),
    command(
        "rescore",
        _rescore,
        "Score a finished run with other rewards and show what they would have changed.",
        CONFIG,
        RUN,
        option("--rewards", type=Path, required=True, help="YAML file with a list `rewards`, as in a configuration"),
        option("--out", dest="output", type=Path, required=True, help="folder for scores and rescore.json"),
        option("--workers", type=int, help="number of processes (default: scoring.workers of the run)"),
    ),
    command(
        "track",
        "rloo_pipeline.stages.track:track",
        "Send the metrics of a run, finished or running, to W&B or MLflow.",
        RUN,
        option("--to", nargs="+", action="extend", choices=TRACKERS, help="trackers (default: those in report_to)"),
        option(
            "--round",
            dest="round_",
            metavar="ROUND",
            type=int,
            help="a finished round; later rounds are sent only if their files are newer",
        ),
        option("--earlier", type=Path, nargs="?", help="output of an earlier call; its metrics are not sent again"),
        option("--output", type=Path, help="JSON file with what was sent; a failure is then only a warning"),
    ),
)
