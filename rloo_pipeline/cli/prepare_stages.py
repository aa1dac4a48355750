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
    SHARD,
    path,
    stage,
)
from rloo_pipeline.cli.stage_setup import runs_here
from rloo_pipeline.config import Config


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
    if runs_here(arguments, config.deepspeed, config.deepspeed.forward_processes):
        from rloo_pipeline.stages.checks import checks

        inputs = (arguments.assets, arguments.prompts, arguments.policy, arguments.probe)
        checks(config, *inputs, arguments.trial, arguments.output)


def _difficulty(config: Config, arguments: argparse.Namespace) -> None:
    from rloo_pipeline.stages.difficulty import difficulty

    difficulty(config, arguments.prompts, arguments.policy, arguments.shard, arguments.output)


COMMANDS = (
    stage("stage-assets", _stage_assets, "Fetch or copy model and datasets; may use the network."),
    stage("prompts", _prompts, "Template and tokenize the prompts into Arrow.", ASSETS),
    stage(
        "warmstart",
        _warmstart,
        "Make policy 0: the model itself, or the model after SFT on demonstrations.",
        *(ASSETS, PROMPTS),
        option("--trial", type=Path, nargs="?", help="checks of the untrained model, if warmstart.train is auto"),
    ),
    stage(
        "probe",
        _probe,
        "Sample and score probe prompts with policy 0.",
        *(PROMPTS, POLICY),
        option("--earlier", type=Path, nargs="?", help="probe of the untrained model; reused if that is policy 0"),
        samples=True,
    ),
    stage(
        "checks",
        _checks,
        "Check policy 0 by its probe; fails if RLOO could not learn from it.",
        *(ASSETS, PROMPTS, POLICY, path("probe", "table that probe wrote")),
        option("--trial", action="store_true", help="do not fail, because SFT may follow"),
    ),
    stage(
        "difficulty",
        _difficulty,
        "Measure how often policy 0 solves each training prompt of one shard.",
        *(PROMPTS, POLICY, SHARD),
        samples=True,
    ),
)
