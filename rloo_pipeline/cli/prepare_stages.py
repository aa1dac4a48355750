"""Stages before the first round: assets, prompts, policy 0 and its checks.

workflow/rules/prepare.smk and warmstart.smk call them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.cli.command import option
from rloo_pipeline.cli.stage_options import (
    ASSETS,
    POLICY,
    PROMPTS,
    REWARD_MODEL,
    SHARD,
    path,
    runs_here,
    stage,
    whole_config,
)
from rloo_pipeline.config import Config
from rloo_pipeline.errors import RefusedPolicyError


def _warmstart(config: Config, arguments: argparse.Namespace) -> None:
    trains = config.warmstart.sft is not None
    if arguments.trial is not None:  # read here because the stage's module imports torch, and launchers should not
        trains = bool(read_artifact(arguments.trial)["asks_for_sft"])
    if runs_here(arguments, config.deepspeed, None if trains else 1):
        from rloo_pipeline.stages.warmstart import warmstart

        warmstart(config, arguments.assets, arguments.prompts, arguments.trial, arguments.output)


def _checks(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.checks import checks
    from rloo_pipeline.stages.report_so_far import write_page

    inputs = (arguments.assets, arguments.prompts, arguments.policy, arguments.probed)
    try:
        checks(config, *inputs, arguments.trial, arguments.output, arguments.reward_model)
    except RefusedPolicyError:
        run = arguments.output.absolute().parents[1]
        write_page(whole_config(arguments).only("report"), run, "about the failed checks")
        raise


COMMANDS = (
    stage("stage-assets", "Fetch or copy model and datasets; may use the network."),
    stage("prompts", "Template and tokenize the prompts into Arrow.", ASSETS),
    stage(
        "warmstart",
        "Make policy 0: the model itself, or the model after SFT on demonstrations.",
        *(ASSETS, PROMPTS),
        option("--trial", type=Path, nargs="?", help="checks of the untrained model, if warmstart.train is auto"),
        run=_warmstart,
    ),
    stage(
        "reward-model",
        "Train a reward model from preferences.",
        *(ASSETS, PROMPTS, path("model", "folder of the reward model to write")),
        ranks="processes",
    ),
    stage(
        "probe",
        "Sample and score probe prompts with policy 0.",
        *(PROMPTS, POLICY, REWARD_MODEL),
        option("--earlier", type=Path, nargs="?", help="probe of the untrained model; reused if that is policy 0"),
        samples=True,
    ),
    stage(
        "checks",
        "Check policy 0 by its probe; fails if RLOO could not learn from it.",
        *(ASSETS, PROMPTS, POLICY, path("probe", "table that probe wrote", dest="probed", metavar="PROBE")),
        *(REWARD_MODEL, option("--trial", action="store_true", help="do not fail, because SFT may follow")),
        run=_checks,
        ranks="forward_processes",
    ),
    stage(
        "difficulty",
        "Measure how often policy 0 solves each training prompt of one shard.",
        *(PROMPTS, POLICY, SHARD, REWARD_MODEL),
        samples=True,
    ),
)
