"""The commands that look at a run, before, while and after it runs: check, plan, doctor, gate, diagnose, watch,
track.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.config.loading import ConfigArguments, load
from rloo_pipeline.trackers.trackers import TRACKERS

AddCommand = Callable[..., argparse.ArgumentParser]
WITHOUT_CONFIG = ("check", "diagnose", "doctor", "plan", "track", "watch")
"""Those that are given a configuration, or a run that has one."""
DEFAULT = Path("config/config.yaml")


def add_commands(add: AddCommand) -> None:
    """Adds them to the parser; `add` makes a command of a name, a function and a sentence."""
    gate = add("gate", _gate, "Look at a round before the next one begins; may end the run.", "output")
    gate.add_argument("--round", type=int, required=True, help="number of the round, from 1")
    diagnose = add("diagnose", _diagnose, "Say what is wrong with a run, finished or in flight.")
    diagnose.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")
    watch = add("watch", _watch, "Show a run while it is in flight; reads its files only.")
    watch.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")
    watch.add_argument("--once", action="store_true", help="show it once and end")
    watch.add_argument("--every", type=float, default=3.0, help="seconds between two looks")
    track = add("track", _track, "Have W&B or MLflow hold the metrics of a run, finished or in flight.")
    track.add_argument("run", type=Path, metavar="RUN", help="folder of the run, results/<run>")
    track.add_argument("--to", nargs="+", choices=TRACKERS, help="trackers; by default those that report_to names")
    track.add_argument("--round", type=int, help="the latest round that is sure to be of this run; by default any")
    track.add_argument("--earlier", type=Path, nargs="?", help="what an earlier call wrote; that is not sent again")
    track.add_argument("--output", type=Path, help="JSON file for what was sent; failing is then a warning")
    check = add("check", _check, "Look at model, data and reward functions in seconds, before any engine starts.")
    plan = add("plan", _plan, "Say what a run will take: memory, jobs, tokens, disk, GPU-hours.")
    plan.add_argument("--cluster-gpu", metavar="NAME[:GB]", help="the card that stages will have, such as h100:80")
    doctor = add("doctor", _doctor, "Look whether this node has what a run needs; offline.")
    doctor.add_argument("--profile", type=Path, help="folder of Snakemake's profile, such as profiles/slurm")
    doctor.add_argument("--no-image", action="store_true", help="stages run in this environment, without Apptainer")
    for command in (check, plan, doctor):
        command.add_argument("configuration", type=Path, metavar="CONFIG", nargs="?", default=DEFAULT, help="YAML file")
        command.add_argument(
            "--config", nargs="+", default=[], metavar="KEY=VALUE", help="keys to change, as for Snakemake"
        )


def _gate(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.gate import gate

    run = arguments.output.absolute().parents[2]
    gate(load(arguments.config or run / "config.yaml").only("gate"), run, arguments.round, arguments.output)


def _diagnose(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.diagnose import diagnose

    diagnose(arguments.run)


def _watch(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.watch import watch

    watch(arguments.run, arguments.once, arguments.every)


def _track(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.track import track

    track(arguments.run, arguments.to, arguments.round, arguments.earlier, arguments.output)


def _asked(arguments: argparse.Namespace) -> ConfigArguments:
    return ConfigArguments(arguments.configuration, arguments.config)


def _check(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.check import check

    check(_asked(arguments))


def _plan(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.plan import plan_run

    plan_run(_asked(arguments).config, arguments.cluster_gpu)


def _doctor(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.doctor import doctor

    doctor(_asked(arguments), Path(), arguments.profile, not arguments.no_image)
