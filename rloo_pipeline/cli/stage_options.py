"""A stage as a command, and the options that several stages have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import assets, lineage
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.cli.command import CONFIG, Command, Option, call, command, option
from rloo_pipeline.cli.stage_setup import card_facts, runs_here, stage_config, whole_config
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import environment, gpu_claims
from rloo_pipeline.workers import gpu_shares


def stage(
    name: str,
    about: str,
    *options: Option,
    run: Callable[[Config, argparse.Namespace], None] | None = None,
    samples: bool = False,
    log_probs: bool = False,
) -> Command:
    """A stage, whose function gets the sections of the configuration that it may read.

    Args:
        name: name of the stage.
        about: one sentence for the help.
        options: besides `--config` and `--output`.
        run: imports and calls its function. By default that is the function of its name in `stages/`, which takes the
            configuration, and the options by their names.
        samples: True if it has a sampler, whose threads and GPUs are taken before the function imports torch. A stage
            with several ranks, or one of several, takes them in `runs_here`.
        log_probs: True if it computes log-probs without gradient, in as many processes as hold the weights.
    """
    function = name.replace("-", "_")
    taken = [one for one in (*options, OUTPUT) if one is not REWARD_MODEL]  # that one changes the configuration

    def start(arguments: argparse.Namespace) -> None:
        config = stage_config(arguments, name)
        if samples:
            take_sampler(config)
        if log_probs and not runs_here(arguments, config.deepspeed, config.deepspeed.forward_processes):
            return
        _open_policies(config, arguments)
        from rloo_pipeline.artifacts import tables

        try:
            facts = lineage.decided(config, name, getattr(arguments, "only", None)) | card_facts(config, name)
            with tables.common_facts(**facts):
                config = with_reward_model(config, getattr(arguments, "reward_model", None))
                if run is not None:
                    run(config, arguments)
                else:
                    call(f"rloo_pipeline.stages.{function}:{function}", taken, arguments, config)
        except UserError:
            raise
        except Exception as error:
            from rloo_pipeline.before_run import out_of_memory

            role = gpu_shares.role_of(name)
            out_of_memory.refuse(error, role, whole_config(arguments), _model_of(arguments))
            raise

    return command(name, start, about, CONFIG, OUTPUT, *options)


def with_reward_model(config: Config, measured: Path | None) -> Config:
    """The configuration with the run's own reward model in the options of the rewards that use it.

    Args:
        config: the stage's configuration.
        measured: checks.json of the reward model, beside its folder; None if the run trains none.

    Raises:
        UserError: a file of the model is missing or damaged, or checks.json is about another model.
    """
    if measured is None or "rewards" not in vars(config):
        return config
    from rloo_pipeline.artifacts.policy import measured_reward_model

    return config.with_reward_model(str(measured_reward_model(measured)))


def _open_policies(config: Config, arguments: argparse.Namespace) -> None:
    """Replaces the folders that options give by policies; that of `stage-assets` has the base model."""
    trusted = getattr(getattr(config, "model", None), "trust_remote_code", False)  # `score` has no section model
    for name in ("policy", "sampler", "start"):
        if (folder := getattr(arguments, name, None)) is not None:
            setattr(arguments, name, Policy(assets.policy_of(folder), trusted))


def _model_of(arguments: argparse.Namespace) -> Policy | None:
    """The stage's policy, or the model that it makes one from; None if the stage has several or none."""
    if hasattr(arguments, "policy"):
        return arguments.policy  # type: ignore[no-any-return]
    return Policy(assets.model_of(arguments.assets)) if hasattr(arguments, "assets") else None


def take_sampler(config: Config) -> None:
    """Takes the threads and GPUs of a sampler, of reward functions that take turns with it, and of environments."""
    environment.use_threads(config.vllm.threads)
    gpus = (reward.gpus for reward in getattr(config, "rewards", ()))
    rollout: Rollout | None = getattr(config, "rollout", None)  # lm-eval's tasks have no environments
    beside = rollout.environment_gpus if rollout else 0
    gpu_claims.claim(max(config.vllm.gpus, *gpus, 1) + beside)
    gpu_claims.set_aside(beside)


def path(name: str, about: str, **keywords: Any) -> Option:
    """An option that takes a path and has to be there."""
    return option(f"--{name}", type=Path, required=True, help=about, **keywords)


def shards(name: str) -> Option:
    """An option that takes the files of one table of a round."""
    return option(f"--{name}", type=Path, nargs="+", required=True, help=f"all shards of the round's {name}, in order")


OUTPUT = path("output", "file or folder to write")
ASSETS = path("assets", "folder that stage-assets wrote")
PROMPTS = path("prompts", "folder that prompts wrote")
POLICY = path("policy", "folder of a policy, or of `stage-assets` for the base model")
IMAGES = option("--prompts", type=Path, nargs="?", help="folder that prompts wrote, in a run with images")
ROLLOUTS = path("rollouts", "table of rollouts")
CHECKS = option(
    "--checks", type=Path, nargs="?", help="checks.json of the run, to prove that the sampler had the policy"
)
REWARD_MODEL = option("--reward-model", type=Path, nargs="?", help="checks.json of the run's own reward model")
SUMMARY = path("summary", "JSON file for the summary")
SHARD = option("--shard", type=int, required=True, help="number of the shard, from 0")
ROUND = option("--round", dest="round_", metavar="ROUND", type=int, required=True, help="number of the round, from 1")
PASS_RATES = (
    option("--difficulty", type=Path, nargs="*", default=[], help="all tables that difficulty wrote, in order"),
    option("--pass-rates", type=Path, nargs="?", help="what pass-rates wrote for the round that made the policy"),
)
NAME = option("--name", required=True, help="name of the evaluation, such as warmstart or final")
