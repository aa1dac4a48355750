"""The jobs of a run by its configuration, without Snakemake: what the rules in workflow/rules/ make of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from rloo_pipeline.config.run import Config


class RunJob(NamedTuple):
    """One job of the DAG."""

    stage: str
    """Name of its rule; `update` for all rules of updates."""
    output: str
    """A file that it writes last, or a folder that it writes at once; relative to the run's folder, as the log is."""
    log: str
    policy: int | None = None
    """Number of the policy that the output is made from, if it is."""


def all_jobs(config: Config) -> Iterator[RunJob]:
    """All jobs of a run from the beginning."""
    rounds = chain.from_iterable(jobs_of_round(config, number) for number in range(1, config.rounds + 1))
    return chain(jobs_before_rounds(config), rounds, jobs_after_rounds(config))


def jobs_before_rounds(config: Config) -> Iterator[RunJob]:
    """Assets, prompts, warm start."""
    yield RunJob("stage_assets", "assets/assets.json", "logs/stage_assets.log")
    yield RunJob("prompts", "prompts/counts.json", "logs/prompts.log")
    if config.tries_model:
        yield RunJob("trial_probe", "warmstart/trial/probe.parquet", "logs/trial_probe.log")
        yield RunJob("trial_checks", "warmstart/trial/checks.json", "logs/trial_checks.log")
    yield RunJob("warmstart", "policies/00000", "logs/warmstart.log")
    yield RunJob("probe", "warmstart/probe.parquet", "logs/probe.log", 0)
    yield RunJob("checks", "warmstart/checks.json", "logs/checks.log", 0)
    for shard in _shards(config) if config.measures_difficulty else ():
        yield RunJob("difficulty", f"warmstart/difficulty/{shard}.parquet", f"logs/difficulty/{shard}.log", 0)


def jobs_of_round(config: Config, number: int) -> Iterator[RunJob]:
    """Those that the next policy waits for, then the others."""
    name, policy = f"{number:05d}", config.rollout.policy_of(number)
    tables = {"rollout": "rollouts", "score": "scores"} | ({"reference": "reference"} if config.uses_reference else {})
    for stage, table in tables.items():
        for shard in _shards(config):
            yield RunJob(stage, f"rounds/{name}/{table}/{shard}.parquet", f"logs/{stage}/{name}-{shard}.log", policy)
    for reward in (reward.column for reward in config.rewards if reward.gpus):
        for shard in _shards(config):
            output = f"rounds/{name}/scores/parts/{reward}/{shard}.parquet"
            yield RunJob("score_alone", output, f"logs/score/{name}-{shard}-{reward}.log", policy)
    is_last, refills = number == config.rounds, config.rollout.refill > 0
    draws_by_it = config.updates_pass_rates and number <= config.rollout.policy_of(config.rounds)
    for stage, output, is_there in (
        ("refill", f"rounds/{name}/refill/scores.parquet", refills),
        ("refill_reference", f"rounds/{name}/refill/reference.parquet", refills and config.uses_reference),
        ("update", f"rounds/{name}/metrics.json", True),
        ("pass_rates", f"rounds/{name}/pass_rates.parquet", draws_by_it),
        ("gate", f"rounds/{name}/diagnosis.json", not is_last),
        ("held_out", f"rounds/{name}/held_out.json", config.held_out_each_round > 0),
        ("track", f"tracking/{name}.json", bool(config.trackers)),
        ("report_so_far", f"pages/{name}.json", not is_last and config.page_is_due(number)),
    ):
        if is_there:
            yield RunJob(stage, output, f"logs/{stage}/{name}.log", number - 1 if stage == "update" else policy)


def jobs_after_rounds(config: Config) -> Iterator[RunJob]:
    """Evaluations, the choice of a policy, the report."""
    if config.evaluation.harness:
        yield RunJob("stage_harness", "harness/tasks.json", "logs/stage_harness.log")
    for name, policy in config.evaluated.items():
        for stage, file, is_there in (
            ("evaluate", "summary", True),
            ("distance", "distance", policy > 0),
            ("harness", "harness", config.evaluation.harness is not None),
        ):
            if is_there:
                yield RunJob(stage, f"evaluation/{name}/{file}.json", f"logs/{stage}/{name}.log", policy)
    if config.select:
        yield RunJob("select", "selection.json", "logs/select.log", config.rounds)
        output, log = f"test/{config.seed}/summary.json", f"logs/evaluate_chosen/{config.seed}.log"
        yield RunJob("evaluate_chosen", output, log, config.rounds)
    yield RunJob("report", "summary.json", "logs/report.log", config.rounds)


def _shards(config: Config) -> list[str]:
    return [f"{shard:03d}" for shard in range(config.rollout.shards)]
