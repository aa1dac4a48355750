"""score: rollouts and the columns of their prompts → the score of each reward function and their weighted sum.

A reward function may run in a job of its own (`only`), which writes a table with only its scores. The job with the
other functions reads them from there (`parts`) and writes the same table as a single job would. That job also scores
the held-out completions of the shard, by the functions that need no GPU, since their processes are running anyway.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import lineage, round_tables, tables
from rloo_pipeline.artifacts.files import check_facts
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.runtime import gpu_claims
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.score_batch import FunctionScores
from rloo_pipeline.user_code.score_table import as_table, join, score_columns, scoring_facts
from rloo_pipeline.workers import kept_models


def score(
    config: Config,
    prompts: Path,
    policy: Policy,
    rollouts: Path,
    output: Path,
    only: str | None = None,
    parts: Sequence[Path] = (),
    held_out: Sequence[Path] | None = None,
) -> None:
    """Scores one shard of a round.

    Args:
        config: the stage's configuration, with the reward functions.
        prompts: folder that the stage `prompts` wrote.
        policy: a policy with the tokenizer of the rollouts.
        rollouts: table of the shard's rollouts.
        output: the table of scores; with `only`, the table of one function.
        only: name of the one function to run.
        parts: tables that this stage wrote with `only`.
        held_out: table of the shard's held-out completions, if any, and the table to write for their scores.

    Raises:
        UserError: a reward function fails or does not return one finite number or None per completion; the
            configuration has no function `only`; or a part belongs to a different shard.
    """
    separate = dict(_part(config.rewards, part) for part in parts)
    rewards = [reward for reward in config.rewards if reward.column not in separate and only in (None, reward.column)]
    if only is not None and not rewards:
        suggestion = did_you_mean(only, [reward.column for reward in config.rewards])
        raise UserError(f"--only {only}: no reward of the configuration has this name{suggestion}")
    gpus = sum(reward.gpus for reward in rewards)
    gpu_claims.claim(gpus)
    gpu_claims.note_subprocess_gpus(gpus)
    held_out_rollouts, held_out_scores = held_out or (None, None)
    # the processes start while tables are read
    with kept_models.pools(rewards, config.rewards, config.scoring.workers) as pools:
        shard = tables.read(rollouts, "rollouts")
        about = {**tables.facts_about(shard), "policy": tables.footer(shard)["policy"]}
        for file, part in zip(parts, separate.values(), strict=True):
            check_facts(file, tables.footer(part), {"rollouts": about["rollouts"]})
            tables.check_aligned(shard, part, file)
        others = round_tables.read_held_out_shard(held_out_rollouts, shard) if held_out_rollouts else shard.slice(0, 0)
        columns = score_columns(pools, shard, PromptSet(prompts / "train"), policy, more=len(others) > 0)
        if held_out_scores:
            _score_held_out(pools, others, prompts, policy, held_out_scores)
    if only is not None:
        scores = as_table(
            shard, tables.part_schema(only), {tables.score_column(only): columns[only].scores}, [columns[only]]
        )
        files = {key: fact for key, fact in scoring_facts(rewards).items() if key == lineage.REWARD_FILES}
        tables.write(output, scores, scores.schema, "part", **about, **files)
    else:
        columns |= {name: _read(part, name) for name, part in separate.items()}
        scores = join(config.rewards, shard, columns)
        about |= scoring_facts(config.rewards, separate.values())
        tables.write(output, scores, scores.schema, "scores", **about)


def _score_held_out(pools: WorkerPools, shard: pa.Table, prompts: Path, policy: Policy, output: Path) -> None:
    """Scores held-out completions and writes their table. Writes an empty one if there are none."""
    rewards = [reward for reward in pools.rewards if not reward.gpus]
    schema = tables.scores_schema([reward.column for reward in rewards])
    scores = schema.empty_table()
    if len(shard):
        columns = score_columns(pools, shard, PromptSet(held_out_part(prompts)), policy, only_failures=True)
        scores = join(rewards, shard, columns)
    about = {**tables.facts_about(shard), "policy": tables.footer(shard)["policy"]}
    tables.write(output, scores, schema, "held_out_scores", **about, **scoring_facts(rewards))


def _part(rewards: Sequence[Reward], file: Path) -> tuple[str, pa.Table]:
    """The name of a function that ran alone, and the table of its scores.

    Raises:
        UserError: the table is damaged, or the configuration has no such function.
    """
    table = tables.read(file, "part")
    [name] = tables.functions_of(table)
    if name not in [reward.column for reward in rewards]:
        raise UserError(f"{file}: holds scores of '{name}', which the configuration does not list; delete it")
    return name, table


def _read(part: pa.Table, name: str) -> FunctionScores:
    scores, errors, seconds = (part[column].to_pylist() for column in (tables.score_column(name), "error", "seconds"))
    return FunctionScores(scores, errors, [None] * len(part), seconds)
