"""The stages as commands; some call their function in a way of their own. The rules in workflow/rules/ call them."""

import argparse
from pathlib import Path

from rloo_pipeline.artifacts import files, lineage
from rloo_pipeline.artifacts.model_files import STATES
from rloo_pipeline.cli.command import CONFIG, command, option
from rloo_pipeline.cli.stage_options import (
    OUTPUT,
    REWARD_MODEL,
    path,
    run_folder,
    runs_here,
    stage,
    stage_config,
    whole_config,
)
from rloo_pipeline.config.loading import load


def _restore_policy(arguments: argparse.Namespace) -> None:
    config, run = stage_config(arguments, "update"), run_folder(arguments)
    if not runs_here(arguments, config, "update"):
        return
    from rloo_pipeline.artifacts.policy import Policy
    from rloo_pipeline.stages.update import restore

    restore(config, Policy(arguments.output, config.model.trust_remote_code), run / "trainer")


def _gate(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.gate import gate

    run = arguments.output.absolute().parents[2]
    gate(load(arguments.config or run / "config.yaml").only("gate"), run, arguments.round_, arguments.output)


def _report_so_far(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report_so_far import report_so_far

    run = arguments.output.absolute().parents[1]
    report_so_far(load(run / "config.yaml").only("report"), run, arguments.output)


def _report(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report import report, tables_of

    config, run = stage_config(arguments, "report"), run_folder(arguments)
    rounds, evaluations = tables_of(config, run)
    # with --rerun-triggers, keys may have changed between rounds, but evaluations must be comparable
    lineage.require_configured(whole_config(arguments), [*rounds[-1:], *evaluations])
    report(config, run, arguments.summary, arguments.output)
    files.remove_older(run / STATES / f"{config.rounds:05d}")  # its round will not have to run again


ROUND = option("--round", dest="round_", metavar="ROUND", type=int, required=True, help="number of the round, from 1")
SUMMARY = path("summary", "JSON file for the summary")
COMMANDS = (
    # before the first round
    stage("stage-assets", "Fetch or copy model and datasets; may use the network."),
    stage("prompts", "Template and tokenize the prompts into Arrow."),
    stage("warmstart", "Make policy 0: the model itself, or the model after SFT on demonstrations."),
    stage("reward-model", "Train a reward model from preferences."),
    stage("probe", "Sample and score probe prompts with policy 0.", REWARD_MODEL),
    stage("checks", "Check policy 0 by its probe completions; fails if RLOO could not learn from them."),
    stage("difficulty", "Measure how often policy 0 solves each training prompt of one shard.", REWARD_MODEL),
    # in a round
    stage("rollout", "Sample one shard of a round with vLLM."),
    stage(
        "score",
        "Score one shard with the reward functions.",
        option("--only", metavar="NAME", help="score with this function only; the result is for --parts"),
        option(
            "--held-out",
            type=Path,
            nargs=2,
            metavar=("ROLLOUTS", "SCORES"),
            help="table of the shard's held-out completions, and the table to write for their scores",
        ),
        REWARD_MODEL,
    ),
    stage("refill", "Sample and score more completions if too few groups of a round have a signal.", REWARD_MODEL),
    stage("reference", "Compute the log-probs of one shard under the reference policy."),
    stage("teacher", "Compute the log-probs of one shard under the teacher."),
    stage("update", "Train the next policy on a round."),
    command(
        "restore-policy",
        _restore_policy,
        "Recreate a policy's weights that were lost with a node's own disk, from the tables of its rounds (exchange).",
        *(CONFIG, OUTPUT),
    ),
    stage("pass-rates", "Add a round's scores to the pass rates by which later rounds draw prompts."),
    stage("held-out", "Summarize the held-out completions of a round's policy."),
    command("gate", _gate, "Look for symptoms after a round; may end the run.", CONFIG, OUTPUT, ROUND),
    command("report-so-far", _report_so_far, "Write report.html of a run in progress.", OUTPUT),
    # after the rounds
    stage("evaluate", "Sample and score the held-out prompts.", REWARD_MODEL),
    stage("judge-pairs", "Let the judge compare the final policy's held-out completions with those of the warm start."),
    command(
        "select",
        "rloo_pipeline.stages.select:select",
        "Choose the best round and arm by the evaluations on dataset.dev.",
        OUTPUT,
        option("runs", nargs="+", help="folders of the runs, relative to the output's folder"),
    ),
    stage("evaluate-chosen", "Sample and score the prompts of dataset.eval with the chosen policy."),
    stage("prove-chosen", "Prove that these completions come from the chosen policy."),
    stage(
        "distance",
        "Compute the KL of a policy from policy 0 on its held-out completions.",
        path("reference", "folder of policy 0", dest="start", metavar="REFERENCE"),
    ),
    stage("stage-harness", "Fetch the data of lm-eval's tasks; may use the network."),
    stage("harness", "Run lm-eval's tasks on a policy."),
    command("report", _report, "Write summary.json and report.html of a run.", CONFIG, OUTPUT, SUMMARY),
)
