"""Stages after the rounds: evaluations, selection of round and arm, report. See workflow/rules/evaluate.smk."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import fence, function_copies, lineage
from rloo_pipeline.cli.command import command, option
from rloo_pipeline.cli.stage_options import (
    CHECKS,
    IMAGES,
    OUTPUT,
    POLICY,
    PROMPTS,
    REWARD_MODEL,
    card_facts,
    path,
    run_folder,
    runs_here,
    stage,
    take_sampler,
    whole_config,
    with_reward_model,
)
from rloo_pipeline.config import Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.runtime import reproducible

if TYPE_CHECKING:
    from rloo_pipeline.stages.evaluate_chosen import Chosen


def _select(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.select import select

    select([arguments.output.parent / run for run in arguments.runs], arguments.output)


def _chosen(arguments: argparse.Namespace, stage: str) -> tuple[Config, Chosen]:
    """Returns a stage's configuration for the chosen policy, and the choice. The fence makes this process the only
    writer.
    """
    from rloo_pipeline.stages.evaluate_chosen import chosen_of

    chosen = chosen_of(arguments.selection, arguments.seed)
    config = load(chosen.run / "config.yaml").only(stage)
    reproducible.prepare(config.reproducible)
    fence.acquire(arguments.selection.absolute().parent, arguments.output)
    return config, chosen


def _evaluate_chosen(arguments: argparse.Namespace) -> None:
    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.stages.evaluate_chosen import evaluate_chosen

    config, chosen = _chosen(arguments, "evaluate-chosen")
    function_copies.use(chosen.run)
    take_sampler(config)
    if any(reward.uses_own_model for reward in config.rewards):
        config = with_reward_model(config, chosen.run / "reward_model" / "checks.json")
    with tables.common_facts(**lineage.decided(config, "evaluate-chosen"), **card_facts(config, "evaluate-chosen")):
        evaluate_chosen(config, chosen, arguments.output, arguments.greedy, arguments.summary)


def _prove_chosen(arguments: argparse.Namespace) -> None:
    config, chosen = _chosen(arguments, "prove-chosen")
    if runs_here(arguments, config, "prove-chosen"):
        from rloo_pipeline.stages.prove_chosen import prove_chosen

        prove_chosen(config, chosen, arguments.completions, arguments.output)


def _report(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.report import report, tables_of

    run = run_folder(arguments)
    rounds, evaluations = tables_of(config, run)
    # with --rerun-triggers, keys may have changed between rounds, but evaluations must be comparable
    lineage.require_configured(whole_config(arguments), [*rounds[-1:], *evaluations])
    report(config, run, arguments.summary, arguments.output)


NAME = option("--name", required=True, help="name of the evaluation, such as warmstart or final")
SUMMARY = path("summary", "JSON file for the summary")
SELECTION = path("selection", "file that select wrote")
SEED = option("--seed", type=int, required=True, help="seed of the chosen run")
COMMANDS = (
    stage(
        "evaluate",
        "Sample and score the held-out prompts.",
        *(PROMPTS, POLICY, path("greedy", "table for the greedy completions"), SUMMARY, NAME, REWARD_MODEL),
    ),
    stage(
        "judge-pairs",
        "Let the judge compare the final policy's held-out completions with those of the warm start.",
        *(PROMPTS, path("before", "completions of the warm start"), path("after", "completions of the final policy")),
    ),
    command(
        "select",
        _select,
        "Choose the best round and arm by the evaluations on dataset.dev.",
        OUTPUT,
        option("runs", nargs="+", help="folders of the runs, relative to the output's folder"),
    ),
    command(
        "evaluate-chosen",
        _evaluate_chosen,
        "Sample and score the prompts of dataset.eval with the chosen policy.",
        *(OUTPUT, SELECTION, path("greedy", "table for the greedy completions"), SUMMARY, SEED),
    ),
    command(
        "prove-chosen",
        _prove_chosen,
        "Prove that these completions come from the chosen policy.",
        *(OUTPUT, SELECTION, path("completions", "table that evaluate-chosen wrote"), SEED),
    ),
    stage(
        "distance",
        "Compute the KL of a policy from policy 0 on its held-out completions.",
        *(path("completions", "table of completions that evaluate wrote"), POLICY),
        *(path("reference", "folder of policy 0", dest="start", metavar="REFERENCE"), IMAGES, CHECKS),
    ),
    stage("stage-harness", "Fetch the data of lm-eval's tasks; may use the network."),
    stage("harness", "Run lm-eval's tasks on a policy.", POLICY, NAME),
    stage("report", "Write summary.json and report.html of a run.", SUMMARY, run=_report),
)
