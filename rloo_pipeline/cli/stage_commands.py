"""The stages of the DAG, which Snakemake's rules call as `rloo STAGE`: a function and a table row for each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.artifacts import fence
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.cli.command import CONFIG, Command, Option, command, option
from rloo_pipeline.cli.stage_setup import run_folder, runs_here, stage_config
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.runtime import environment, gpu_claims


def _stage_assets(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.stage_assets import stage_assets

    stage_assets(config, arguments.output)


def _prompts(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.prompts import prompts

    prompts(config, arguments.assets, arguments.output)


def _warmstart(config: Config, arguments: argparse.Namespace) -> None:
    trains = config.warmstart.sft is not None
    if arguments.trial is not None:  # read here because the stage's module imports torch, and launchers should not
        trains = bool(read_artifact(arguments.trial)["asks_for_sft"])
    if runs_here(arguments, config.deepspeed, None if trains else 1):
        from rloo_pipeline.stages.warmstart import warmstart

        warmstart(config, arguments.assets, arguments.prompts, arguments.trial, arguments.output)


def _probe(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.probe import probe

    probe(config, arguments.prompts, arguments.policy, arguments.earlier, arguments.output)


def _checks(config: Config, arguments: argparse.Namespace) -> None:
    environment.use_threads(config.deepspeed.threads)
    gpu_claims.claim(1, from_the_end=True)
    from rloo_pipeline.stages.checks import checks

    inputs = (arguments.assets, arguments.prompts, arguments.policy, arguments.probe)
    checks(config, *inputs, arguments.trial, arguments.output)


def _difficulty(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.difficulty import difficulty

    difficulty(config, arguments.prompts, arguments.policy, arguments.shard, arguments.output)


def _rollout(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.data.prompts_of_round import PassRateFiles
    from rloo_pipeline.stages.rollout import rollout

    inputs = (arguments.prompts, arguments.policy, arguments.round, arguments.shard)
    rates = PassRateFiles(arguments.difficulty, arguments.pass_rates)
    rollout(config, *inputs, arguments.output, arguments.held_out, rates)


def _pass_rates(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.pass_rates import pass_rates

    pass_rates(config, arguments.round, arguments.scores, arguments.earlier, arguments.output)


def _refill(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.artifacts.round_tables import RoundFiles
    from rloo_pipeline.data.prompts_of_round import PassRateFiles
    from rloo_pipeline.stages.refill import refill

    inputs = (arguments.prompts, arguments.policy, arguments.round, RoundFiles(arguments.rollouts, arguments.scores))
    rates = PassRateFiles(arguments.difficulty, arguments.pass_rates)
    refill(config, *inputs, arguments.output, arguments.output_scores, rates)


def _held_out(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.artifacts.round_tables import RoundFiles
    from rloo_pipeline.stages.held_out import held_out

    files = RoundFiles(arguments.rollouts, arguments.scores)
    held_out(config, files, arguments.round, arguments.output, arguments.events)


def _score(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.score import HeldOutFiles, score

    if gpus := sum(reward.gpus for reward in config.rewards if reward.column == arguments.only):
        gpu_claims.claim(gpus)
    paths = (arguments.prompts, arguments.policy, arguments.rollouts, arguments.output)
    held_out = HeldOutFiles(*arguments.held_out) if arguments.held_out else None
    score(config, *paths, only=arguments.only, parts=arguments.parts, held_out=held_out)


def _reference(config: Config, arguments: argparse.Namespace) -> None:
    if runs_here(arguments, config.deepspeed, None if config.deepspeed.splits_weights else 1):
        from rloo_pipeline.stages.reference import reference

        reference(config, arguments.policy, arguments.rollouts, arguments.output, arguments.prompts)


def _update(config: Config, arguments: argparse.Namespace) -> None:
    if runs_here(arguments, config.deepspeed):
        from rloo_pipeline.artifacts.round_tables import RoundFiles, TrainingPolicies, UpdateOutputs
        from rloo_pipeline.stages.update import update

        inputs = RoundFiles(arguments.rollouts, arguments.scores, arguments.reference)
        outputs = UpdateOutputs(
            arguments.output, arguments.output_trainer, arguments.metrics, arguments.events, arguments.table
        )
        policies = TrainingPolicies(arguments.policy, arguments.sampler or arguments.policy)
        update(config, arguments.round, policies, arguments.trainer, inputs, outputs, arguments.prompts)


def _gate(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.gate import gate

    run = arguments.output.absolute().parents[2]
    gate(load(arguments.config or run / "config.yaml").only("gate"), run, arguments.round, arguments.output)


def _report_so_far(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report_so_far import report_so_far

    run = arguments.output.absolute().parents[1]
    report_so_far(load(run / "config.yaml").only("report"), run, arguments.output)


def _evaluate(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.artifacts.prompt_set import held_out_part
    from rloo_pipeline.stages.evaluate import EvaluationOutputs, evaluate

    outputs = EvaluationOutputs(arguments.output, arguments.greedy, arguments.summary)
    evaluate(config, held_out_part(arguments.prompts), arguments.policy, arguments.name, outputs)


def _select(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.select import select

    select([arguments.output.parent / run for run in arguments.runs], arguments.output)


def _evaluate_chosen(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.evaluate import EvaluationOutputs
    from rloo_pipeline.stages.evaluate_chosen import chosen_of, evaluate_chosen

    chosen = chosen_of(arguments.selection, arguments.seed)
    config = load(chosen.run / "config.yaml").only("evaluate-chosen")
    fence.acquire(arguments.selection.absolute().parent, arguments.output)
    _take_sampler(config)
    evaluate_chosen(config, chosen, EvaluationOutputs(arguments.output, arguments.greedy, arguments.summary))


def _distance(config: Config, arguments: argparse.Namespace) -> None:
    if runs_here(arguments, config.deepspeed, None if config.deepspeed.splits_weights else 1):
        from rloo_pipeline.stages.distance import distance

        tables = (arguments.completions, arguments.policy, arguments.reference)
        distance(config, *tables, arguments.output, arguments.prompts)


def _stage_harness(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.stage_harness import stage_harness

    stage_harness(config, arguments.output)


def _harness(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.harness import harness

    harness(config, arguments.policy, arguments.name, arguments.output)


def _report(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report import report

    report(config, run_folder(arguments), arguments.summary, arguments.output)


def _stage(
    name: str,
    run: Callable[[Config, argparse.Namespace], None],
    about: str,
    *options: Option,
    samples: bool = False,
) -> Command:
    """A stage, whose function gets the sections of the configuration that it may read.

    Args:
        name: of the stage.
        run: imports and calls it.
        about: one sentence for the help.
        options: besides `--config` and `--output`.
        samples: whether it has a sampler, whose threads and GPUs are taken before the function imports torch. A stage
            with several ranks, or one of several, takes them in `runs_here`.
    """

    def start(arguments: argparse.Namespace) -> None:
        config = stage_config(arguments, name)
        if samples:
            _take_sampler(config)
        run(config, arguments)

    return command(name, start, about, CONFIG, OUTPUT, *options)


def _take_sampler(config: Config) -> None:
    """Takes the threads and GPUs of a sampler, and of reward functions that take turns with it."""
    environment.use_threads(config.vllm.threads)
    gpus = (reward.gpus for reward in getattr(config, "rewards", ()))
    gpu_claims.claim(max(config.vllm.tensor_parallel_size, *gpus, 1))


def _path(name: str, about: str) -> Option:
    return option(f"--{name}", type=Path, required=True, help=about)


def _shards(name: str) -> Option:
    return option(f"--{name}", type=Path, nargs="+", required=True, help=f"all shards of the round's {name}, in order")


OUTPUT = _path("output", "file or folder to write")
ASSETS = _path("assets", "folder that stage-assets wrote")
PROMPTS = _path("prompts", "folder that prompts wrote")
POLICY = _path("policy", "folder of a policy")
IMAGES = option("--prompts", type=Path, nargs="?", help="folder that prompts wrote, in a run with images")
ROLLOUTS = _path("rollouts", "table of rollouts")
SUMMARY = _path("summary", "JSON file for the summary")
SHARD = option("--shard", type=int, required=True, help="number of the shard, from 0")
ROUND = option("--round", type=int, required=True, help="number of the round, from 1")
PASS_RATES = (
    option("--difficulty", type=Path, nargs="*", default=[], help="all tables that difficulty wrote, in order"),
    option("--pass-rates", type=Path, nargs="?", help="what pass-rates wrote for the round that made the policy"),
)
NAME = option("--name", required=True, help="name of the evaluation, such as warmstart or final")

COMMANDS = (
    _stage("stage-assets", _stage_assets, "Fetch or copy model and datasets; may use the network."),
    _stage("prompts", _prompts, "Template and tokenize the prompts into Arrow.", ASSETS),
    _stage(
        "warmstart",
        _warmstart,
        "Make policy 0: the model itself, or the model after SFT on demonstrations.",
        *(ASSETS, PROMPTS),
        option("--trial", type=Path, nargs="?", help="checks of the untrained model, if warmstart.train is auto"),
    ),
    _stage(
        "probe",
        _probe,
        "Sample and score probe prompts with policy 0.",
        *(PROMPTS, POLICY),
        option("--earlier", type=Path, nargs="?", help="probe of the untrained model; reused if that is policy 0"),
        samples=True,
    ),
    _stage(
        "checks",
        _checks,
        "Check policy 0 by its probe; fails if RLOO could not learn from it.",
        *(ASSETS, PROMPTS, POLICY, _path("probe", "table that probe wrote")),
        option("--trial", action="store_true", help="do not fail, because SFT may follow"),
    ),
    _stage(
        "difficulty",
        _difficulty,
        "Measure how often policy 0 solves each training prompt of one shard.",
        *(PROMPTS, POLICY, SHARD),
        samples=True,
    ),
    _stage(
        "rollout",
        _rollout,
        "Sample one shard of a round with vLLM.",
        *(PROMPTS, POLICY, ROUND),
        SHARD,
        *PASS_RATES,
        option("--held-out", type=Path, help="table for some held-out completions of the same policy"),
        samples=True,
    ),
    _stage(
        "score",
        _score,
        "Score one shard with the reward functions.",
        *(PROMPTS, POLICY, ROLLOUTS),
        option("--only", metavar="NAME", help="score with this function only; the result is for --parts"),
        option("--parts", type=Path, nargs="*", default=[], help="tables of functions that were scored with --only"),
        option(
            "--held-out",
            type=Path,
            nargs=2,
            metavar=("ROLLOUTS", "SCORES"),
            help="table of the shard's held-out completions, and the table to write for their scores",
        ),
    ),
    _stage(
        "refill",
        _refill,
        "Sample and score further completions if too few groups of a round teach.",
        *(PROMPTS, POLICY, ROUND, _shards("rollouts"), _shards("scores"), *PASS_RATES),
        _path("output-scores", "table for the scores"),
        samples=True,
    ),
    _stage(
        "reference",
        _reference,
        "Compute the log-probs of one shard under the reference policy.",
        *(POLICY, ROLLOUTS, IMAGES),
    ),
    _stage(
        "update",
        _update,
        "Train the next policy on a round.",
        *(POLICY, _path("output-trainer", "folder for the trainer state")),
        _path("metrics", "JSON file for the metrics of the round"),
        _path("events", "TensorBoard event file for the metrics"),
        _path("table", "Parquet file for what the update used of each completion"),
        ROUND,
        option("--sampler", type=Path, help="policy that the rollouts are of (rollout.lag); by default --policy"),
        option("--trainer", type=Path, nargs="?", help="trainer state of the previous round; none in round 1"),
        *(_shards("rollouts"), _shards("scores"), IMAGES),
        option("--reference", type=Path, nargs="*", default=[], help="all shards of the reference log-probs, in order"),
    ),
    _stage(
        "pass-rates",
        _pass_rates,
        "Add a round's scores to the pass rates that later rounds draw their prompts by.",
        *(ROUND, _shards("scores")),
        option(
            "--earlier", type=Path, nargs="*", default=[], help="that of the round before, or what difficulty wrote"
        ),
    ),
    _stage(
        "held-out",
        _held_out,
        "Sum up the held-out completions of a round's policy.",
        *(_shards("rollouts"), _shards("scores"), ROUND),
        _path("events", "TensorBoard event file for the accuracy"),
    ),
    command("gate", _gate, "Look for symptoms after a round; may end the run.", CONFIG, OUTPUT, ROUND),
    _stage(
        "evaluate",
        _evaluate,
        "Sample and score the held-out prompts.",
        *(PROMPTS, POLICY, _path("greedy", "table for the greedy completions"), SUMMARY, NAME),
        samples=True,
    ),
    command(
        "select",
        _select,
        "Choose the best round and arm by the evaluations on dataset.dev.",
        OUTPUT,
        option("runs", nargs="+", help="folders of the runs, relative to that of the output"),
    ),
    command(
        "evaluate-chosen",
        _evaluate_chosen,
        "Sample and score the prompts of dataset.eval with what was chosen.",
        OUTPUT,
        *(_path("selection", "file that select wrote"), _path("greedy", "table for the greedy completions"), SUMMARY),
        option("--seed", type=int, required=True, help="seed of the chosen run"),
    ),
    _stage(
        "distance",
        _distance,
        "Compute the KL of a policy from policy 0 on its held-out completions.",
        *(_path("completions", "table of completions that evaluate wrote"), POLICY),
        *(_path("reference", "folder of policy 0"), IMAGES),
    ),
    _stage("stage-harness", _stage_harness, "Fetch the data of lm-eval's tasks; may use the network."),
    _stage("harness", _harness, "Run lm-eval's tasks on a policy.", POLICY, NAME, samples=True),
    command("report-so-far", _report_so_far, "Write report.html of a run in flight.", OUTPUT),
    _stage("report", _report, "Write summary.json and report.html of a run.", SUMMARY),
)
