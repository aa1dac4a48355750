"""Stages of a round; see workflow/rules/rounds.smk."""

import argparse
from pathlib import Path

from rloo_pipeline.cli.command import CONFIG, Option, command, option
from rloo_pipeline.cli.stage_options import (
    ASSETS,
    CHECKS,
    IMAGES,
    OUTPUT,
    POLICY,
    PROMPTS,
    REWARD_MODEL,
    SHARD,
    optional,
    path,
    run_folder,
    runs_here,
    stage,
    stage_config,
)
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load


def _update(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.artifacts.round_tables import RoundFiles
    from rloo_pipeline.stages.update import UpdateOutputs, update

    inputs = RoundFiles(arguments.rollouts, arguments.scores, arguments.reference, arguments.teacher)
    outputs = UpdateOutputs(arguments.output, arguments.metrics, arguments.events, arguments.table)
    policies = (arguments.policy, arguments.sampler or arguments.policy)
    more = (arguments.prompts, arguments.checks)
    update(config, arguments.round_, *policies, arguments.trainer, inputs, outputs, *more)


def _restore_policy(arguments: argparse.Namespace) -> None:
    config, run = stage_config(arguments, "update"), run_folder(arguments)
    if not runs_here(arguments, config, "update"):
        return
    from rloo_pipeline.artifacts.policy import Policy
    from rloo_pipeline.stages.update import restore

    prompts = run / "prompts" if config.dataset.image_column else None
    restore(config, Policy(arguments.output, config.model.trust_remote_code), run / "trainer", prompts)


def _gate(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.gate import gate

    run = arguments.output.absolute().parents[2]
    gate(load(arguments.config or run / "config.yaml").only("gate"), run, arguments.round_, arguments.output)


def _report_so_far(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report_so_far import report_so_far

    run = arguments.output.absolute().parents[1]
    report_so_far(load(run / "config.yaml").only("report"), run, arguments.output)


def shards(name: str) -> Option:
    """Makes an option that takes all files of one table of a round."""
    return option(f"--{name}", type=Path, nargs="+", required=True, help=f"all shards of the round's {name}, in order")


def several(name: str, about: str) -> Option:
    """Makes an option that takes any number of tables, or none."""
    return option(f"--{name}", type=Path, nargs="*", default=[], help=about)


ROLLOUTS = path("rollouts", "table of rollouts")
ROUND = option("--round", dest="round_", metavar="ROUND", type=int, required=True, help="number of the round, from 1")
PASS_RATES = (
    several("difficulty", "all tables that difficulty wrote, in order"),
    optional("pass-rates", "table that pass-rates wrote for the round that made the policy"),
)
COMMANDS = (
    stage(
        "rollout",
        "Sample one shard of a round with vLLM.",
        *(PROMPTS, POLICY, ROUND, SHARD, *PASS_RATES),
        option("--held-out", type=Path, help="table for some held-out completions of the same policy"),
        several("before", "rollouts of the previous round (rollout.token_budget)"),
    ),
    stage(
        "score",
        "Score one shard with the reward functions.",
        *(PROMPTS, POLICY, ROLLOUTS, REWARD_MODEL),
        option("--only", metavar="NAME", help="score with this function only; the result is for --parts"),
        several("parts", "tables of functions that were scored with --only"),
        option(
            "--held-out",
            type=Path,
            nargs=2,
            metavar=("ROLLOUTS", "SCORES"),
            help="table of the shard's held-out completions, and the table to write for their scores",
        ),
    ),
    stage(
        "refill",
        "Sample and score more completions if too few groups of a round have a signal.",
        *(PROMPTS, POLICY, ROUND, shards("rollouts"), shards("scores"), *PASS_RATES, REWARD_MODEL),
        path("output-scores", "table for the scores"),
    ),
    stage("reference", "Compute the log-probs of one shard under the reference policy.", *(POLICY, ROLLOUTS, IMAGES)),
    stage(
        "teacher",
        "Compute the log-probs of one shard under the teacher.",
        *(ASSETS, ROLLOUTS),
        optional("prompts", "folder that prompts wrote, in a run with several teachers"),
    ),
    stage(
        "update",
        "Train the next policy on a round.",
        POLICY,
        path("metrics", "JSON file for the metrics of the round"),
        path("events", "TensorBoard event file for the metrics"),
        path("table", "Parquet file for the values that the update used for each completion"),
        ROUND,
        option("--sampler", type=Path, help="policy that sampled the rollouts (rollout.lag; default: --policy)"),
        path("trainer", "folder of the run's trainer states, to be read and written"),
        *(shards("rollouts"), shards("scores"), IMAGES),
        several("reference", "all shards of the reference log-probs, in order"),
        several("teacher", "all shards of the teacher's log-probs, in order"),
        CHECKS,
        run=_update,
    ),
    command(
        "restore-policy",
        _restore_policy,
        "Recreate a policy's weights that were lost with a node's own disk, from the tables of its rounds (exchange).",
        *(CONFIG, OUTPUT),
    ),
    stage(
        "pass-rates",
        "Add a round's scores to the pass rates by which later rounds draw prompts.",
        *(ROUND, shards("scores")),
        several("earlier", "pass rates of the previous round, or the table that difficulty wrote"),
    ),
    stage(
        "held-out",
        "Summarize the held-out completions of a round's policy.",
        *(shards("rollouts"), shards("scores"), ROUND),
        path("events", "TensorBoard event file for the accuracy"),
        optional("policy-metrics", "metrics.json of the round that made the policy"),
    ),
    command("gate", _gate, "Look for symptoms after a round; may end the run.", CONFIG, OUTPUT, ROUND),
    command("report-so-far", _report_so_far, "Write report.html of a run in progress.", OUTPUT),
)
