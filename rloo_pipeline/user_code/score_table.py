"""Turns a rollouts table into a scores table: one column per reward function, and their weighted sum."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.artifacts import lineage, reward_models, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Reward, Scoring, provenance
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.user_code.completion_text import as_completion
from rloo_pipeline.user_code.dispatch import Elsewhere, WorkerPools
from rloo_pipeline.user_code.reward_call import OWN_ARGUMENTS
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch, log_summary

OF_PROMPTS = {*OWN_ARGUMENTS, "prompt", "prompt_ids", "environment_observation"}
"""Columns of prompt sets that are not columns of the dataset."""


def score_tables(
    rewards: Sequence[Reward],
    scoring: Scoring,
    rollouts: Sequence[pa.Table],
    prompts: PromptSet,
    policy: Policy,
    elsewhere: Elsewhere | None = None,
) -> list[pa.Table]:
    """Scores rollouts tables with all functions. A function's processes start once, unless several functions take turns
    on GPUs: a process ends when its function's last table is done.
    """
    if len(rollouts) > 1 and sum(bool(reward.gpus) for reward in rewards) > 1:
        return [score_tables(rewards, scoring, [table], prompts, policy, elsewhere)[0] for table in rollouts]
    if any(reward.gpus for reward in rewards):
        devices.free_gpu()  # a sampler in this process may hold the GPU
    with WorkerPools(rewards, scoring.workers, elsewhere=elsewhere) as pools:
        columns = [score_columns(pools, table, prompts, policy, table is not rollouts[-1]) for table in rollouts]
    return [join(rewards, table, results) for table, results in zip(rollouts, columns, strict=True)]


def score_columns(
    pools: WorkerPools,
    rollouts: pa.Table,
    prompts: PromptSet,
    policy: Policy,
    more: bool = False,
    only_failures: bool = False,
) -> dict[str, FunctionScores]:
    """Returns the results of each function, by name, and logs a summary line for each.

    Args:
        pools: the functions, with started workers.
        rollouts: the rollouts.
        prompts: the prompt set that they were sampled from; functions get its columns.
        policy: a policy with the same tokenizer as the one that sampled.
        more: True if the pools score another table after this one.
        only_failures: for rows that supplement another table: log only functions that failed for some rows, and allow a
            function to score none.

    Raises:
        UserError: a function reported for every row of the table that it could not be scored.
    """
    if policy.folder.is_dir():
        policy.verify(lambda name: not name.endswith(".safetensors"))  # rewards read the tokenizer
    starts = [place for place, sample in enumerate(rollouts["sample"].to_pylist()) if sample == 0]
    samples = [end - start for start, end in pairwise([*starts, len(rollouts)])]
    results = pools.score(batch_of(rollouts, prompts), samples, {"tokenizer_path": str(policy.base)}, more)
    for reward, result in zip(pools.rewards, results, strict=True):
        if not only_failures or any(map(any, (result.errors, result.notes))):
            log_summary(reward, result)
        if not only_failures:
            require_scores(reward, result)
    return {reward.column: result for reward, result in zip(pools.rewards, results, strict=True)}


def require_scores(reward: Reward, result: FunctionScores) -> None:
    """Checks that a function did not fail for every row.

    Raises:
        UserError: it reported for every row that it could not be scored.
    """
    if result.notes and all(result.notes):
        raise UserError(
            f"reward '{reward.column}' ({reward.function}) could score none of {len(result.notes)} completions: "
            f"{result.notes[0]}; correct its options, or the data that it needs"
        )


def require_verdicts(judge: Reward, result: FunctionScores) -> None:
    """Checks what a judge returned.

    Raises:
        UserError: a number outside 0 to 1.
    """
    for row, verdict in enumerate(result.scores):
        if verdict is not None and not 0 <= verdict <= 1:
            raise UserError(
                f"judge {judge.column}: returned {verdict:g} for row {row}; return from 0 (the completion is "
                "worse than that of `other_completions`) to 1 (better), or None"
            )


def join(rewards: Sequence[Reward], rollouts: pa.Table, columns: Mapping[str, FunctionScores]) -> pa.Table:
    """Builds the scores table: one column per function, in the order of the configuration, and their weighted sum."""
    scores = {reward.column: columns[reward.column].scores for reward in rewards}
    sums = tables.weighted_sums([reward.weight for reward in rewards], list(scores.values()))
    total = pa.array(sums, from_pandas=True)  # NaN becomes null
    table = as_table(
        rollouts,
        tables.scores_schema(list(scores)),
        {**{tables.score_column(name): values for name, values in scores.items()}, "reward": total},
        [columns[reward.column] for reward in rewards],
    )
    if (nulls := table["reward"].null_count) and any(reward.weight for reward in rewards):
        say(f"{nulls} of {len(table)} completions could not be scored by any reward function")
    return table


def join_scores(rewards: Sequence[Reward], rollouts: pa.Table, scores: pa.Table) -> pa.Table:
    """Joins completions and their scores into one table."""
    fields = list(tables.scores_schema([reward.column for reward in rewards]))[len(tables.KEYS) :]
    schema = pa.schema([*rollouts.schema.remove_metadata(), *fields])
    return pa.table([*rollouts.columns, *scores.columns[len(tables.KEYS) :]], schema=schema)


def as_table(
    rollouts: pa.Table,
    schema: pa.Schema,
    scores: Mapping[str, list[float | None] | pa.Array],
    columns: Sequence[FunctionScores],
) -> pa.Table:
    """Builds a table of scores with the keys of their rollouts, and the summed seconds and joined errors and notes of
    `columns`.
    """
    keys = {"prompt_id": rollouts["prompt_id"], "sample": rollouts["sample"]}
    seconds = np.sum([column.seconds for column in columns], axis=0)
    texts = [one for column in columns for one in (column.errors, column.notes)]
    errors = ["; ".join(filter(None, row)) or None for row in zip(*texts, strict=True)]
    return pa.table({**keys, **scores, "seconds": seconds, "error": errors}, schema=schema)


def scoring_facts(rewards: Sequence[Reward], parts: Iterable[pa.Table] = ()) -> dict[str, str]:
    """Footer facts of a scores table: weights of the reward functions, and digests of user code and reward models.

    Args:
        rewards: the functions.
        parts: tables of functions that ran alone, which name the files of their reward model.
    """
    weights = {reward.column: reward.weight for reward in rewards}
    files = {reward.column: provenance.function_files(reward.function) for reward in rewards}
    digests = {name: _digest(list(of_one.values())) for name, of_one in files.items() if of_one}
    by_key: dict[str, dict[str, str]] = {
        lineage.FUNCTIONS: digests,
        lineage.REWARD_MODELS: {},
        lineage.REWARD_FILES: {},
    }
    for column, folder in reward_models.folders_of(rewards).items():
        key, version = reward_models.version_of(folder)
        by_key[key][column] = version
    for part in parts:
        by_key[lineage.REWARD_FILES] |= json.loads(tables.footer(part).get(lineage.REWARD_FILES, "{}"))
    return {tables.WEIGHTS: json.dumps(weights), **{key: json.dumps(of) for key, of in by_key.items() if of}}


def _digest(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]


def batch_of(rollouts: pa.Table, prompts: PromptSet) -> RewardBatch:
    """The inputs of reward functions for a table of rollouts: TRL's arguments and every dataset column."""
    ids = rollouts["prompt_id"].to_pylist()
    by_id = prompts.by_id(ids)
    rows: list[dict[str, Any]] = [by_id[prompt_id] for prompt_id in ids]
    completions = _completions(rollouts, [row["prompt"] for row in rows])
    names = [name for name in prompts.columns if name not in OF_PROMPTS]
    columns = {name: [row[name] for row in rows] for name in names}
    columns["finish_reason"] = rollouts["finish_reason"].to_pylist()
    if tables.is_episodes(rollouts):
        rewards_and_states = (rollouts[name].to_pylist() for name in ("environment_reward", "environment_state"))
        columns |= environment_columns(list(zip(*rewards_and_states, strict=True)))
    return RewardBatch([row["prompt"] for row in rows], completions, rollouts["completion_ids"].to_pylist(), columns)


def environment_columns(rewards_and_states: Sequence[tuple[float | None, str | None]]) -> dict[str, list[Any]]:
    """The arguments that environments provide to reward functions; `environments` is TRL's.

    Args:
        rewards_and_states: reward of each episode, and the public attributes of its environment as JSON; None without
            an environment, or if its process was lost.

    Returns:
        Both columns, and `environments`, objects with these attributes.
    """
    return {
        "environment_reward": [reward for reward, _ in rewards_and_states],
        "environment_state": [state for _, state in rewards_and_states],
        "environments": [SimpleNamespace(**json.loads(state or "{}")) for _, state in rewards_and_states],
    }


def _completions(rollouts: pa.Table, prompts: Sequence[Any]) -> list[Any]:
    """Completions in TRL's form; for an episode, the messages that follow the prompt."""
    if tables.is_episodes(rollouts):
        return [json.loads(messages) for messages in rollouts["messages"].to_pylist()]
    return list(map(as_completion, rollouts["completion"].to_pylist(), prompts))
