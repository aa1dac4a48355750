"""score: rollouts and the prompts' columns → one score a completion from each reward function, and their weighted
sum.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from rloo_pipeline import tables
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.progress import say
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.rewards.scoring import OWN_ARGUMENTS, Batch, score_all
from rloo_pipeline.training import policy


def score(config: Config, prompts: Path, policy_folder: Path, rollouts: Path, output: Path) -> None:
    """Scores one shard of a round; the policy is one with the tokenizer of those that sampled.

    Raises:
        UserError: a reward function fails or returns something else than one finite number or None a completion.
    """
    rolled = tables.read(rollouts, "rollouts")
    made = score_table(config, rolled, PromptSet(prompts / "train"), policy_folder)
    known = tables.about(rolled)
    about = {key: known[key] for key in ("run", "round", "shard", "seed", "policy")}
    tables.write(output, made, tables.scores_schema([reward.column for reward in config.rewards]), "scores", **about)


def score_table(config: Config, rolled: pa.Table, prompts: PromptSet, policy_folder: Path) -> pa.Table:
    """The scores of a table of rollouts, row by row."""
    rewards, facts = config.rewards, {"tokenizer_path": str(policy.base_of(policy_folder))}
    samples = [sum(1 for _ in same) for _, same in groupby(rolled["prompt_id"].to_pylist())]
    found = score_all(rewards, batch_of(rolled, prompts), samples, config.scoring.workers, facts)
    total = [weighted_sum(rewards, row) for row in zip(*(one.scores for one in found), strict=True)]
    nulls = sum(value is None for value in total)
    if nulls:
        say(f"{nulls} of {len(total)} completions could not be scored by any reward function")
    columns = {reward.column: one.scores for reward, one in zip(rewards, found, strict=True)}
    errors = zip(*(one.errors for one in found), strict=True)
    table = {
        "prompt_id": rolled["prompt_id"],
        "sample": rolled["sample"],
        **columns,
        "reward": total,
        "seconds": [sum(row) for row in zip(*(one.seconds for one in found), strict=True)],
        "error": ["; ".join(said) or None for said in (filter(None, row) for row in errors)],
    }
    return pa.table(table, schema=tables.scores_schema(list(columns)))


def weighted_sum(rewards: list[Reward], scores: tuple[float | None, ...]) -> float | None:
    """Σ w·r over the functions that gave a score: null means "not applicable" and is never counted as 0.

    None when no function of non-zero weight gave a score: the completion is unscorable.
    """
    given = [
        reward.weight * value
        for reward, value in zip(rewards, scores, strict=True)
        if value is not None and reward.weight != 0
    ]
    return sum(given) if given else None


def batch_of(rolled: pa.Table, prompts: PromptSet) -> Batch:
    """What the reward functions see of a table of rollouts: TRL's arguments and every dataset column."""
    ids = rolled["prompt_id"].to_pylist()
    known = prompts.by_id(ids)
    rows: list[dict[str, Any]] = [known[prompt_id] for prompt_id in ids]
    texts = rolled["completion"].to_pylist()
    completions = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    names = [name for name in prompts.table.column_names if name not in {*OWN_ARGUMENTS, "prompt_ids", "prompt"}]
    columns = {name: [row[name] for row in rows] for name in names}
    columns["finish_reason"] = rolled["finish_reason"].to_pylist()
    return Batch([row["prompt"] for row in rows], completions, rolled["completion_ids"].to_pylist(), columns)
