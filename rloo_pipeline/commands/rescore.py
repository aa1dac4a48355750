"""rescore: a finished run's rollouts, scored with other rewards, and what the updates would have seen differently.

Nothing is sampled again. The comparison stops at the advantages, before any KL: the policies of later rounds are those
that the old rewards made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, Reward, Scoring
from rloo_pipeline.errors import UserError
from rloo_pipeline.evaluation.change import Change, change, columns, combine
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.scoring.score_table import score_table
from rloo_pipeline.training.round_data import Tables, completions_of

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_pipeline.training.batch import Batch, Carried


def rescore(config: Config, run: Path, rewards: Sequence[Reward], output: Path, workers: int) -> None:
    """Scores every round of the run in folder `run`; writes tables of scores and rescore.json into `output`.

    Raises:
        UserError: the run has no rollouts, a file of it is damaged, or a reward function fails.
    """
    from rloo_pipeline.training.batch import Carried

    rounds = sorted(folder for folder in (run / "rounds").glob("[0-9]*") if any(folder.glob("rollouts/*.parquet")))
    if not rounds:
        raise UserError(f"{run}: has no rollouts in rounds/*/rollouts; name the folder of a run, results/<run>")
    prompts = PromptSet(run / "prompts" / "train")
    other = config.model_copy(update={"rewards": list(rewards), "scoring": Scoring(workers=workers)})
    carried = {"old": Carried(), "new": Carried()}
    found: dict[str, Change] = {}
    for folder in rounds:
        shards = sorted(folder.glob("rollouts/*.parquet"))
        rolled = tables.read_all(shards, "rollouts")
        old = tables.read_all([folder / "scores" / shard.name for shard in shards], "scores")
        tables.check_aligned(rolled, old, str(folder / "scores"))
        say(f"round {folder.name}: {len(rolled)} completions")
        places = [output / "rounds" / folder.name / "scores" / shard.name for shard in shards]
        new = _scored(other, run, shards, prompts, places)
        batches = {}
        for name, scored in (("old", old), ("new", new)):
            batches[name], carried[name] = _batch(config, rolled, scored, carried[name])
        found[folder.name] = change(
            *(_grid(batches[name].completions.scores, config) for name in ("old", "new")),
            *(_grid(batches[name].advantages.double(), config) for name in ("old", "new")),
        )
    overall = combine(list(found.values()))
    write_json(
        output / "rescore.json",
        {
            "run": config.run,
            "rewards": [reward.model_dump(mode="json") for reward in rewards],
            "rounds": {name: one._asdict() for name, one in found.items()},
            "overall": overall._asdict(),
        },
    )
    show(found, overall)


def _scored(config: Config, run: Path, shards: Sequence[Path], prompts: PromptSet, places: Sequence[Path]) -> pa.Table:
    """The scores of a round, shard by shard, written as the stage `score` writes them."""
    schema = tables.scores_schema([reward.column for reward in config.rewards])
    made = []
    for shard, place in zip(shards, places, strict=True):
        rolled = tables.read(shard, "rollouts")
        made.append(score_table(config, rolled, prompts, run / "policies" / "00000"))
        known = tables.footer(rolled)
        about = {key: known[key] for key in ("run", "round", "shard", "seed", "policy") if key in known}
        tables.write(place, made[-1], schema, "scores", **about)
    return pa.concat_tables(made)


def _batch(config: Config, rolled: pa.Table, scored: pa.Table, carried: Carried) -> tuple[Batch, Carried]:
    """A round's rewards and advantages as the update makes them, without KL and over all completions."""
    from rloo_pipeline.training.batch import make_batch

    completions = completions_of(config, Tables(rolled, scored))
    return make_batch(config.algorithm, config.rollout, completions, carried)


def _grid(values: Tensor, config: Config) -> list[list[float]]:
    """[prompts, samples]."""
    grid: list[list[float]] = values.view(-1, config.rollout.num_generations).tolist()
    return grid


def show(found: dict[str, Change], overall: Change) -> None:
    """The comparison as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="old rewards → new rewards", title_justify="left")
    table.add_column("round")
    for heading in columns():
        table.add_column(heading, justify="right")
    for name, one in found.items():
        table.add_row(str(int(name)), *columns(one).values())
    table.add_section()
    table.add_row("all", *columns(overall).values())
    Console(width=None if Console().is_terminal else 160).print(table)
