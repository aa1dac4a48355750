"""score: rollouts and the prompts' columns → one score a completion from each reward function, and their weighted
sum.

A function may be scored in a job of its own (`only`), into a table with its scores alone, from which the job with the
others takes them (`parts`): the table of all is the same as from one job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline import runtime, tables
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.progress import say
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.rewards.schedule import Crews
from rloo_pipeline.rewards.scoring import OWN_ARGUMENTS, Batch, Scored, score_with, tell
from rloo_pipeline.training import policy


class Column(NamedTuple):
    """What one function made of a table, row by row."""

    scores: list[float | None]
    seconds: list[float]
    errors: list[str | None]


def score(
    config: Config,
    prompts: Path,
    policy_folder: Path,
    rollouts: Path,
    output: Path,
    only: str | None = None,
    parts: Sequence[Path] = (),
) -> None:
    """Scores one shard of a round.

    Args:
        config: with the reward functions.
        prompts: the folder that the stage `prompts` wrote.
        policy_folder: a policy with the tokenizer of those that sampled.
        rollouts: the shard.
        output: the table of scores; with `only` that of one function.
        only: name of the one function to score.
        parts: what the same stage wrote for functions that were scored alone.

    Raises:
        UserError: a reward function fails or returns something else than one finite number or None a completion; there
            is none of that name; or a part is not of this shard.
    """
    given = dict(_part(config.rewards, part) for part in parts)
    todo = [reward for reward in config.rewards if reward.column not in given and only in (None, reward.column)]
    if only is not None and not todo:
        near = did_you_mean(only, [reward.column for reward in config.rewards])
        raise UserError(f"--only {only}: no reward of the configuration has this name{near}")
    runtime.hold_for_others(sum(reward.gpus for reward in todo))
    with Crews(todo, config.scoring.workers) as crews:  # they start while tables are read
        rolled = tables.read(rollouts, "rollouts")
        about = _about(rolled)
        for name, part in given.items():
            tables.check_aligned(rolled, part, f"the scores of {name} alone")
        scored = _scored(crews, rolled, PromptSet(prompts / "train"), policy_folder)
        found = _columns(todo, scored)
        for reward, one in zip(todo, scored, strict=True):
            tell(reward, one)
        if only is not None:
            made = _table(rolled, tables.part_schema(only), {only: found[only].scores}, [found[only]])
            tables.write(output, made, made.schema, "part", **about)
        else:
            found |= {name: _read(part, name) for name, part in given.items()}
            made = _joined(config.rewards, rolled, found)
            _tell_unscorable(made)
            tables.write(output, made, made.schema, "scores", **about)


def score_table(config: Config, rolled: pa.Table, prompts: PromptSet, policy_folder: Path) -> pa.Table:
    """The scores of a table of rollouts by all functions, row by row."""
    if any(reward.gpus for reward in config.rewards):
        runtime.free_gpu()  # where a sampler of this process is on it
    with Crews(config.rewards, config.scoring.workers) as crews:
        found = _scored(crews, rolled, prompts, policy_folder)
    for reward, one in zip(config.rewards, found, strict=True):
        tell(reward, one)
    made = _joined(config.rewards, rolled, _columns(config.rewards, found))
    _tell_unscorable(made)
    return made


def _about(rolled: pa.Table) -> dict[str, str]:
    """What the footer of a table of scores has from that of its rollouts."""
    known = tables.about(rolled)
    return {key: known[key] for key in ("run", "round", "shard", "seed", "policy")}


def _columns(rewards: Sequence[Reward], found: Sequence[Scored]) -> dict[str, Column]:
    """What each function gave, by its name."""
    return {
        reward.column: Column(one.scores, one.seconds, _one_text(one.errors, one.notes))
        for reward, one in zip(rewards, found, strict=True)
    }


def _scored(crews: Crews, rolled: pa.Table, prompts: PromptSet, policy_folder: Path) -> list[Scored]:
    """What each function gives, in the order of the functions."""
    facts = {"tokenizer_path": str(policy.base_of(policy_folder))}
    samples = [sum(1 for _ in same) for _, same in groupby(rolled["prompt_id"].to_pylist())]
    return score_with(crews, batch_of(rolled, prompts), samples, facts)


def _joined(rewards: Sequence[Reward], rolled: pa.Table, found: Mapping[str, Column]) -> pa.Table:
    """The table of scores: a column a function, in the order of the configuration, and their weighted sum."""
    columns = [found[reward.column] for reward in rewards]
    scores = {reward.column: column.scores for reward, column in zip(rewards, columns, strict=True)}
    total = pa.array(_totals(rewards, list(scores.values())), from_pandas=True)  # NaN is null
    return _table(rolled, tables.scores_schema(list(scores)), {**scores, "reward": total}, columns)


def _tell_unscorable(made: pa.Table) -> None:
    if nulls := made["reward"].null_count:
        say(f"{nulls} of {len(made)} completions could not be scored by any reward function")


def _table(
    rolled: pa.Table, schema: pa.Schema, scores: Mapping[str, list[float | None] | pa.Array], columns: Sequence[Column]
) -> pa.Table:
    keys = {"prompt_id": rolled["prompt_id"], "sample": rolled["sample"]}
    seconds = np.sum([column.seconds for column in columns], axis=0)
    errors = _one_text(*(column.errors for column in columns))
    return pa.table({**keys, **scores, "seconds": seconds, "error": errors}, schema=schema)


def _one_text(*columns: list[str | None]) -> list[str | None]:
    """The texts of several columns, row by row."""
    if not any(map(any, columns)):  # nearly always
        return [None] * len(columns[0])
    return ["; ".join(filter(None, row)) or None for row in zip(*columns, strict=True)]


def _part(rewards: Sequence[Reward], file: Path) -> tuple[str, pa.Table]:
    """A table of one function's scores, with its name.

    Raises:
        UserError: it is damaged, or the configuration has no such function.
    """
    table = tables.read(file, "part")
    name = str(table.column_names[len(tables.KEYS)])
    if name not in [reward.column for reward in rewards]:
        raise UserError(f"{file}: holds scores of '{name}', which is no reward of the configuration; delete it")
    return name, table


def _read(part: pa.Table, name: str) -> Column:
    return Column(*(part[column].to_pylist() for column in (name, "seconds", "error")))


def weighted_sum(rewards: Sequence[Reward], scores: tuple[float | None, ...]) -> float | None:
    """Σ w·r over the functions that gave a score: null means "not applicable" and is never counted as 0.

    None when no function of non-zero weight gave a score: the completion is unscorable.
    """
    (total,) = _totals(rewards, [[value] for value in scores])
    return None if np.isnan(total) else float(total)


def _totals(rewards: Sequence[Reward], columns: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """The weighted sum of each row, in the order of the functions; NaN where there is none."""
    total = np.zeros(len(columns[0]))
    given = np.zeros(len(columns[0]), bool)
    for reward, column in zip(rewards, columns, strict=True):
        values = np.array(column, float)  # None is NaN
        known = ~np.isnan(values) & (reward.weight != 0)
        total[known] += reward.weight * values[known]
        given |= known
    total[~given] = np.nan
    return total


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
