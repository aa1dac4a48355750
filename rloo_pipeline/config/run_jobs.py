"""The jobs of a run, from its configuration and without Snakemake; they match the rules in workflow/rules/."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from rloo_pipeline.config.run import Config
from rloo_pipeline.stages.table import ROWS, StageRow


class RunJob(NamedTuple):
    """One job of the DAG."""

    stage: str
    """Name of its rule; `update` for all rules of updates."""
    output: str
    """A file that it writes last, or a folder that it writes atomically. Relative to the run's folder, like `log`."""
    log: str
    policy: int | None = None
    """Number of the policy that the output is made from, if any."""


def all_jobs(config: Config) -> Iterator[RunJob]:
    """All jobs of a run, in order."""
    rounds = chain.from_iterable(jobs_of_round(config, number) for number in range(1, config.rounds + 1))
    return chain(jobs_before_rounds(config), rounds, jobs_after_rounds(config))


def jobs_before_rounds(config: Config) -> Iterator[RunJob]:
    """Jobs for assets, prompts and warm start."""
    return _jobs(config, "before", 0)


def jobs_of_round(config: Config, number: int) -> Iterator[RunJob]:
    """All jobs of a round, including those that the next policy does not wait for."""
    return _jobs(config, "round", number)


def jobs_after_rounds(config: Config) -> Iterator[RunJob]:
    """Jobs for evaluations, the selection of a policy, and the report."""
    return _jobs(config, "after", config.rounds)


def _jobs(config: Config, phase: str, number: int) -> Iterator[RunJob]:
    for row in ROWS:
        if row.phase == phase and (row.when is None or row.when(config, number)):
            for names, policy in _each(config, row, number):
                yield RunJob(row.rule, row.output.format(**names), f"logs/{row.log.format(**names)}.log", policy)


def _each(config: Config, row: StageRow, number: int) -> Iterator[tuple[Mapping[str, str], int | None]]:
    """For each job of a row: the values for the fields in its path, and the policy that its output is made from."""
    sampled = config.rollout.policy_of(number) if row.phase == "round" else None
    policy = {"first": 0, "last": config.rounds, "previous": number - 1, "sampled": sampled}.get(row.policy)
    fixed = {"round": f"{number:05d}", "seed": str(config.seed)}
    shards = [f"{shard:03d}" for shard in range(config.rollout.shards)]
    if row.each == "shard":
        yield from ((fixed | {"shard": shard}, policy) for shard in shards)
    elif row.each == "reward":
        columns = (reward.column for reward in config.rewards if reward.gpus)
        yield from ((fixed | {"reward": column, "shard": shard}, policy) for column in columns for shard in shards)
    elif row.each in ("evaluation", "trained"):
        evaluations = config.candidates if row.each == "trained" else config.evaluated
        yield from ((fixed | {"name": name}, evaluated) for name, evaluated in evaluations.items())
    else:
        yield fixed, policy
