"""score: rollouts and the prompts' columns → one score a completion from each reward function, and their weighted
sum.

A function may be scored in a job of its own (`only`), into a table with its scores alone, from which the job with the
others takes them (`parts`): the table of all is the same as from one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.runtime import devices
from rloo_pipeline.scoring.dispatch import WorkerPools
from rloo_pipeline.scoring.score_table import ScoreColumn, as_table, join, score_columns


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
    devices.note_subprocess_gpus(sum(reward.gpus for reward in todo))
    with WorkerPools(todo, config.scoring.workers) as pools:  # they start while tables are read
        rolled = tables.read(rollouts, "rollouts")
        about = _about(rolled)
        for name, part in given.items():
            tables.check_aligned(rolled, part, f"the scores of {name} alone")
        columns = score_columns(pools, rolled, PromptSet(prompts / "train"), policy_folder)
    if only is not None:
        made = as_table(rolled, tables.part_schema(only), {only: columns[only].scores}, [columns[only]])
        tables.write(output, made, made.schema, "part", **about)
    else:
        columns |= {name: _read(part, name) for name, part in given.items()}
        made = join(config.rewards, rolled, columns)
        tables.write(output, made, made.schema, "scores", **about)


def _about(rolled: pa.Table) -> dict[str, str]:
    """What the footer of a table of scores has from that of its rollouts."""
    known = tables.footer(rolled)
    return {key: known[key] for key in ("run", "round", "shard", "seed", "policy")}


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


def _read(part: pa.Table, name: str) -> ScoreColumn:
    return ScoreColumn(*(part[column].to_pylist() for column in (name, "seconds", "error")))
