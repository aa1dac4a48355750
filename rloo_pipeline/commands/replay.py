"""replay: the episodes of a finished run, played again without the model: the same answers, rewards and states?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import resets
from rloo_pipeline.rollout.episode_replay import Replay, ReplayDifference
from rloo_pipeline.runtime.progress import say

SHOWN = 5
"""Differences that are printed of a shard."""
CHARACTERS = 200
"""Characters that are printed of an answer."""


def replay(config: Config, run: Path, round_: int | None, shard: int | None) -> None:
    """Plays the episodes of a run again and prints what differs.

    Args:
        config: the run's configuration.
        run: the run's folder.
        round_: a round; by default all.
        shard: a shard; by default all.

    Raises:
        UserError: the rollouts do not exist or have no tools, a file is damaged, or an answer differs.
    """
    if not config.rollout.uses_tools:
        raise UserError(f"{run}: its configuration has neither rollout.tools nor rollout.environment to play again")
    rounds, shards = ("[0-9]*" if round_ is None else f"{round_:05d}"), ("*" if shard is None else f"{shard:03d}")
    files = sorted(run.glob(f"rounds/{rounds}/rollouts/{shards}.parquet"))
    files += sorted(run.glob(f"rounds/{rounds}/refill/rollouts.parquet")) if shard is None else []
    if not files:
        raise UserError(
            f"{run}: has no rollouts rounds/{rounds}/rollouts/{shards}.parquet; name another round or shard"
        )
    prompts = PromptSet(run / "prompts" / "train")
    different = 0
    for file in files:
        differences = _replay(config.rollout, prompts, file, str(file.relative_to(run)))
        different += len({difference.row for difference in differences})
    if different:
        raise UserError(
            f"{run}: {different} episodes came out differently; with the run's copies of your functions (without "
            "--config) a tool depends on something besides its arguments and `random`, such as a clock or a search"
        )


def _replay(rollout: Rollout, prompts: PromptSet, file: Path, name: str) -> list[ReplayDifference]:
    """The differences of one shard."""
    table = tables.read(file, "rollouts")
    columns = ["messages", "finish_reason", "environment_reward", "environment_state"]
    ids = table["prompt_id"].to_pylist()
    by_id = prompts.by_id(ids)
    with resets.pool_of(rollout) as pool:
        outcome = Replay(pool, [by_id[prompt_id] for prompt_id in ids], table.select(columns).to_pylist()).run()
    rows = len({difference.row for difference in outcome.differences})
    result = f"{rows} episodes differ" if rows else "all answers, rewards and states are those of the file"
    say(f"{name}: {len(table)} episodes, {outcome.calls} calls: {result}")
    _show(outcome.differences)
    return outcome.differences


def _show(differences: Sequence[ReplayDifference]) -> None:
    for difference in differences[:SHOWN]:
        name, stored, replayed = (text[:CHARACTERS] for text in difference[1:])
        say(f"  row {difference.row}, {name}: {stored!r}, now {replayed!r}")
    if len(differences) > SHOWN:
        say(f"  … and {len(differences) - SHOWN} more")
