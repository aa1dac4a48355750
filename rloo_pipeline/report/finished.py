"""Reads finished runs from their folders, to compare them."""

import json
from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.files import check_facts, read_artifact
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.checks.statistics import Array, Flags
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.completions import is_correct
from rloo_pipeline.judging.run_files import of_same_prompts, read_config, read_held_out, read_metrics
from rloo_pipeline.report.jobs import costs, jobs_of
from rloo_pipeline.report.run_tables import read_completions


class OutdatedEvaluationError(UserError):
    """The configuration of the evaluations has changed since the policies were evaluated."""


class FinishedRun(NamedTuple):
    """The data of a finished run."""

    config: Config
    summary: JSON
    """summary.json."""
    rounds: list[JSON]
    """metrics.json of every round."""
    held_out: list[JSON]
    """held_out.json of every round that has one of as many prompts as the latest."""
    training_prompts: list[str]
    """prompt_id of each training prompt."""
    held_out_prompts: list[str]
    """prompt_id of each evaluated held-out prompt."""
    right: Flags
    """True for the final policy's right samples, [held-out prompts, samples]."""
    functions: dict[str, str]
    """Digests of the user's code or the reward model that scored the final policy, by column. Earlier releases recorded
    only reward models that the run had trained.
    """
    seconds: dict[str, float]
    """Wall-clock seconds of all jobs of each stage."""

    @property
    def accuracy(self) -> Array:
        """The final policy's share of right samples, [held-out prompts]."""
        shares: Array = self.right.mean(axis=1)
        return shares

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.run

    @property
    def deciding(self) -> str:
        """Name of the reward function that decides what counts as right."""
        return self.config.deciding_reward.column


def read(folder: Path) -> FinishedRun:
    """Reads the run in a folder.

    Raises:
        OutdatedEvaluationError: the configuration of the evaluations has changed since the policies were evaluated.
        UserError: the folder has no run, the run is not finished, or a file of it is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folders of finished runs, such as results/demo")
    config = read_config(folder)
    summary = _summary(config, folder)
    rounds = [read_metrics(folder, number) for number in range(1, config.rounds + 1)]
    tokens = sum(metrics["num_completion_tokens"] for metrics in rounds)
    final = summary["final"] | lineage.named_policy(folder, config.rounds)
    if (summary["tokens"]["rollouts"], summary["final"]) != (tokens, final):
        raise UserError(f"{folder / 'summary.json'}: of other rounds than those in the folder; {_finish(folder)}")
    samples = config.evaluation.num_generations
    columns = ["prompt_id", "sample", *(tables.score_column(reward.column) for reward in config.rewards)]
    completions = read_completions(folder, "final", columns=columns)
    right = is_correct(config, completions, samples)
    if not isclose(right.mean(), final["accuracy"]):
        raise OutdatedEvaluationError(
            f"{folder / 'summary.json'}: {final['accuracy']:.1%} of the final policy's answers are right, but by the "
            f"folder's config.yaml {right.mean():.1%}; {_finish(folder)}"
        )
    for name in ("warmstart", "final"):
        file = folder / "evaluation" / name / "completions.parquet"
        if other := lineage.other_key(config, file):
            raise OutdatedEvaluationError(f"{file}: {other}; {_finish(folder)}")
    return FinishedRun(
        config,
        summary,
        rounds,
        of_same_prompts(read_held_out(folder, range(1, config.rounds + 1))),
        PromptSet(folder / "prompts" / "train").table["prompt_id"].to_pylist(),
        completions["prompt_id"].to_pylist()[::samples],
        right,
        _versions(tables.footer(completions)),
        {cost.stage: round(cost.seconds, 1) for cost in costs(jobs_of(folder, config.rounds))},
    )


def _summary(config: Config, folder: Path) -> JSON:
    """Reads the run's summary, and checks that it belongs to this configuration.

    Raises:
        UserError: the run is not finished, or it was finished and then started again with another configuration.
    """
    file = folder / "summary.json"
    if not file.exists():
        raise UserError(f"{file}: no such file, so the run is not finished; {_finish(folder)}")
    summary: JSON = read_artifact(file)
    configured = {"num_generations": config.evaluation.num_generations}
    check_facts(file, summary, {"rounds": config.rounds, "seed": config.seed}, _finish(folder))
    check_facts(file, summary["final"], configured, _finish(folder))
    return summary


def _versions(facts: Mapping[str, str]) -> dict[str, str]:
    """The versions of reward functions and models in the facts of a table, by column."""
    keys = (lineage.FUNCTIONS, lineage.REWARD_MODELS, lineage.REWARD_FILES)
    return {column: version for key in keys for column, version in json.loads(facts.get(key, "{}")).items()}


def _finish(folder: Path) -> str:
    return f"finish the run with: snakemake --cores all --configfile {folder / 'config.yaml'}"
