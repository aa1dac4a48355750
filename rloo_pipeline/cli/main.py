"""`rloo STAGE …`: parses the words, calls the stage, turns errors into one line. Nothing else happens here."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from rloo_pipeline import __version__
from rloo_pipeline.artifacts import fence
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.cli import cluster, insight, rewards
from rloo_pipeline.cli.help import Commands, Parser
from rloo_pipeline.cluster import nodes
from rloo_pipeline.config import Config, Deepspeed
from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import UserError, explain
from rloo_pipeline.runtime import cost, environment, progress, ranks

Command = Callable[[argparse.Namespace], None]


def main(words: Sequence[str] | None = None) -> None:
    """The command `rloo`; exits with 0, with 1 after an error said in one line, or with 2 on unknown words."""
    words = list(sys.argv[1:] if words is None else words)
    arguments = _parser().take(words)
    arguments.words = words
    nodes.take_rank()
    environment.prepare(arguments.log)
    try:
        arguments.command(arguments)
        fence.release(done=True)
        cost.end()
    except (Exception, KeyboardInterrupt) as error:
        where = ""
        if arguments.log or ranks.is_rank():
            logging.getLogger("traceback").error("what led to it:", exc_info=error)
        if arguments.log and not isinstance(error, UserError):
            where = f" (the traceback is in {arguments.log})"
        ranks.tell_launcher(explain(error))
        progress.fail(f"rloo {words[0]}: error: {explain(error)}{where}")
        raise SystemExit(1) from None
    finally:
        fence.release()


def _config(arguments: argparse.Namespace, stage: str) -> Config:
    """The part of the configuration that the stage may read. Of those at work on this output, this is the latest."""
    if arguments.config:
        return load(arguments.config).only(stage)
    run = _run_folder(arguments)
    fence.acquire(run, arguments.output)
    return load(run / "config.yaml").only(stage)


def _run_folder(arguments: argparse.Namespace) -> Path:
    """The folder of the run: the nearest one above the output that has a config.yaml.

    Raises:
        UserError: there is none.
    """
    output: Path = arguments.output
    for folder in output.absolute().parents:
        if (folder / "config.yaml").exists():
            return folder
    raise UserError(f"{output}: no config.yaml in a folder above it; name the configuration with --config")


def _stage_assets(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.stage_assets import stage_assets

    stage_assets(_config(arguments, "stage-assets"), arguments.output)


def _prompts(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.prompts import prompts

    prompts(_config(arguments, "prompts"), arguments.assets, arguments.output)


def _warmstart(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "warmstart")
    trained = config.warmstart.sft is not None
    if arguments.trial is not None:  # the stage's module is heavy, and torchrun.launch wants a light parent
        trained = bool(read_json(arguments.trial)["asks_for_sft"])
    if _ranks(arguments, config.deepspeed, None if trained else 1):
        from rloo_pipeline.stages.warmstart import warmstart

        warmstart(config, arguments.assets, arguments.prompts, arguments.trial, arguments.output)


def _probe(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "probe")
    environment.use_threads(config.vllm.threads)
    from rloo_pipeline.stages.probe import probe

    probe(config, arguments.prompts, arguments.policy, arguments.earlier, arguments.output)


def _checks(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "checks")
    environment.use_threads(config.deepspeed.threads)
    from rloo_pipeline.stages.checks import checks

    checks(
        *(config, arguments.assets, arguments.prompts, arguments.policy, arguments.probe),
        *(arguments.trial, arguments.output),
    )


def _rollout(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "rollout")
    environment.use_threads(config.vllm.threads)
    from rloo_pipeline.stages.rollout import rollout

    rollout(config, arguments.prompts, arguments.policy, arguments.round, arguments.shard, arguments.output)


def _score(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.score import score

    places = (arguments.prompts, arguments.policy, arguments.rollouts, arguments.output)
    score(_config(arguments, "score"), *places, only=arguments.only, parts=arguments.parts)


def _reference(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "reference")
    environment.use_threads(config.deepspeed.threads)
    from rloo_pipeline.stages.reference import reference

    reference(config, arguments.policy, arguments.rollouts, arguments.output)


def _update(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "update")
    if _ranks(arguments, config.deepspeed):
        from rloo_pipeline.stages.update import UpdateOutputs, update
        from rloo_pipeline.training.round_data import Inputs

        inputs = Inputs(arguments.rollouts, arguments.scores, arguments.reference)
        outputs = UpdateOutputs(
            arguments.output, arguments.output_trainer, arguments.metrics, arguments.events, arguments.table
        )
        update(config, arguments.round, arguments.policy, arguments.trainer, inputs, outputs)


def _ranks(arguments: argparse.Namespace, section: Deepspeed, processes: int | None = None) -> bool:
    """Whether this process does the work itself; if the stage wants several ranks, starts them, waits, and says no."""
    environment.use_threads(section.threads)
    processes = processes or section.processes
    if processes == 1 or ranks.is_rank():
        nodes.join()
        return True
    words = _without_log(arguments.words)
    if section.nodes > 1:
        nodes.launch(section.nodes, processes, section.threads, arguments.output, words)
    else:
        from rloo_pipeline.runtime import torchrun

        torchrun.launch(processes, words)
    return False


def _without_log(words: Sequence[str]) -> list[str]:
    """The same call without `--log`: ranks write where the process that starts them does."""
    kept = [word for word in words if not word.startswith("--log=")]
    place = kept.index("--log") if "--log" in kept else len(kept)
    return kept[:place] + kept[place + 2 :]


def _evaluate(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "evaluate")
    environment.use_threads(config.vllm.threads)
    from rloo_pipeline.stages.evaluate import EvaluationOutputs, evaluate

    outputs = EvaluationOutputs(arguments.output, arguments.greedy, arguments.summary)
    evaluate(config, arguments.prompts, arguments.policy, arguments.name, outputs)


def _distance(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "distance")
    environment.use_threads(config.deepspeed.threads)
    from rloo_pipeline.stages.distance import distance

    distance(config, arguments.completions, arguments.policy, arguments.reference, arguments.output)


def _stage_harness(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.stage_harness import stage_harness

    stage_harness(_config(arguments, "stage-harness"), arguments.output)


def _harness(arguments: argparse.Namespace) -> None:
    config = _config(arguments, "harness")
    environment.use_threads(config.vllm.threads)
    from rloo_pipeline.stages.harness import harness

    harness(config, arguments.policy, arguments.name, arguments.output)


def _report(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report import report

    report(_config(arguments, "report"), _run_folder(arguments), arguments.summary, arguments.output)


def _compare(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.commands.compare import compare

    compare(arguments.runs, arguments.output, arguments.summary)


def _profiles(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.cluster import profiles

    for line in profiles.install(arguments.source):
        print(line)


def _worker(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.workers import server

    server.serve(main, arguments.socket, arguments.controller, arguments.preload)


@cache
def _parser() -> Commands:
    """All commands and their options; made once in a process, since a worker is asked again and again."""
    parser = Commands(
        "rloo",
        usage="rloo [--version] COMMAND …",
        description="RLOO post-training. `snakemake --configfile my-run.yaml` starts a run and goes on with it; these "
        "are the commands around it, and the stages that it calls.",
        epilog="`rloo COMMAND --help` says what a command takes.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.commands = parser.add_subparsers(
        prog="rloo", metavar="COMMAND", required=True, parser_class=Parser
    )

    def stage(name: str, command: Command, about: str, *paths: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=about, description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.set_defaults(command=command)
        sub.add_argument(
            "--log", type=Path, default=None, help="file for everything, tracebacks and the engines' words included"
        )
        if name not in ("compare", "profiles", "reward-test", *cluster.WITHOUT_CONFIG, *insight.WITHOUT_CONFIG):
            sub.add_argument(
                "--config",
                type=Path,
                help="the configuration; by default config.yaml in the run's folder, above the output",
            )
        for path in paths:
            sub.add_argument(f"--{path}", type=Path, required=True, help=HELP[path])
        return sub

    stage(
        "stage-assets",
        _stage_assets,
        "Put model and datasets in place; the only stage that may use a network.",
        "output",
    )
    stage("prompts", _prompts, "Template and tokenize the prompts into Arrow.", "assets", "output")
    warmstart = stage(
        "warmstart",
        _warmstart,
        "Make policy 0, by SFT on demonstrations or as the model is.",
        "assets",
        "prompts",
        "output",
    )
    warmstart.add_argument(
        "--trial", type=Path, nargs="?", help="checks of the model as it is, where warmstart.train is auto"
    )
    probe = stage("probe", _probe, "Sample and score probe prompts with policy 0.", "prompts", "policy", "output")
    probe.add_argument(
        "--earlier", type=Path, nargs="?", help="probe of the model as it is, taken over where the policy is still that"
    )
    checks = stage(
        "checks",
        _checks,
        "Judge policy 0 by its probe; fails when RLOO could learn nothing.",
        "assets",
        "prompts",
        "policy",
        "probe",
        "output",
    )
    checks.add_argument("--trial", action="store_true", help="a failure stops nothing: SFT may still come")
    rollout = stage("rollout", _rollout, "Sample one shard of a round with vLLM.", "prompts", "policy", "output")
    rollout.add_argument("--round", type=int, required=True, help="number of the round, from 1")
    rollout.add_argument("--shard", type=int, required=True, help="number of the shard, from 0")
    score = stage(
        "score", _score, "Score one shard with the reward functions.", "prompts", "policy", "rollouts", "output"
    )
    rewards.add_parts(score)
    stage("reference", _reference, "Log-probs of one shard under the reference policy.", "policy", "rollouts", "output")
    update = stage(
        "update",
        _update,
        "Make the next policy from a round.",
        "policy",
        "output",
        "output-trainer",
        "metrics",
        "events",
        "table",
    )
    update.add_argument("--round", type=int, required=True, help="number of the round, from 1")
    update.add_argument(
        "--trainer", type=Path, nargs="?", default=None, help="trainer state of the round before; none in round 1"
    )
    for shards in ("rollouts", "scores"):
        update.add_argument(
            f"--{shards}", type=Path, nargs="+", required=True, help=f"all shards of the round's {shards}, in order"
        )
    update.add_argument(
        "--reference",
        type=Path,
        nargs="*",
        default=[],
        help="all shards of the reference log-probs, where beta is not 0",
    )
    evaluate = stage(
        "evaluate",
        _evaluate,
        "Sample and score the held-out prompts.",
        *("prompts", "policy", "output", "greedy", "summary"),
    )
    distance = stage(
        "distance",
        _distance,
        "KL of a policy from policy 0 on its held-out completions.",
        "completions",
        "policy",
        "output",
    )
    distance.add_argument("--reference", type=Path, required=True, help="folder of policy 0")
    stage("stage-harness", _stage_harness, "Put the data of lm-eval's tasks in place; may use a network.", "output")
    harness = stage("harness", _harness, "Tasks of lm-eval on a policy.", "policy", "output")
    for one in (evaluate, harness):
        one.add_argument("--name", required=True, help="what is evaluated, such as warmstart or final")
    stage("report", _report, "Write summary.json and report.html of a run.", "output", "summary")
    compare = stage("compare", _compare, "Lay finished runs side by side on one page.", "output")
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN_FOLDER", help="folder of a finished run")
    compare.add_argument("--summary", type=Path, default=None, help="JSON file for what the page says")
    rewards.add_commands(stage)
    insight.add_commands(stage)
    cluster.add_commands(stage)
    worker = commands.add_parser("worker", help="Run stages for a Snakemake on this machine; it starts these itself.")
    worker.set_defaults(command=_worker, log=None)
    worker.add_argument("--socket", type=Path, required=True, help="socket to listen on, in a folder of one's own")
    worker.add_argument("--controller", type=int, required=True, help="process to work for; the worker ends with it")
    worker.add_argument("--preload", type=int, metavar="THREADS", help="import what training needs at once")
    profiles = stage("profiles", _profiles, "Link this project's profiles to where `snakemake --profile` finds them.")
    profiles.add_argument("action", choices=["install"], help="what to do")
    profiles.add_argument("--source", type=Path, default=Path("profiles"), help="folder of the profiles")
    return parser


HELP = {
    "output": "file or folder to write",
    "assets": "folder that stage-assets wrote",
    "prompts": "folder that prompts wrote",
    "policy": "folder of a policy",
    "probe": "table that probe wrote",
    "rollouts": "table of rollouts",
    "output-trainer": "folder for the trainer state",
    "metrics": "JSON file for the round's metrics",
    "events": "TensorBoard event file for the same",
    "table": "Parquet file for what the update used of each completion",
    "summary": "JSON file for the summary",
    "completions": "table of completions that evaluate wrote",
    "greedy": "table for the greedy completions",
}
