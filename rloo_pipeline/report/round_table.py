"""The completions of a round in one table: rollouts with their scores and with the values of the update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import round_tables, tables
from rloo_pipeline.artifacts.round_tables import RoundFiles


def read_round(folder: Path, shards: Sequence[str]) -> pa.Table:
    """Joins the tables of a round, one row per completion.

    Args:
        folder: results/<run>/rounds/<round>.
        shards: file names of the shards, such as 000.parquet.

    Returns:
        The columns of rollouts and scores, and those of train.parquet once it exists, which are null for completions
        that the update did not use.

    Raises:
        UserError: a table is missing or damaged, or the tables do not belong together.
    """
    paths = [[folder / kind / shard for shard in shards] for kind in ("rollouts", "scores")]
    rollouts, scores, _ = round_tables.read(RoundFiles(*paths), round=int(folder.name))
    columns = {name: table[name] for table in (rollouts, scores) for name in table.column_names}
    if (folder / "train.parquet").exists():
        trained = tables.read(folder / "train.parquet", "train", round=int(folder.name))
        places = {key: place for place, key in enumerate(_keys(trained))}
        order = pa.array([places.get(key) for key in _keys(rollouts)], type=pa.int64())
        columns |= {name: trained[name].take(order) for name in trained.column_names if name not in columns}
    return pa.table(columns)


def _keys(table: pa.Table) -> list[tuple[str, int]]:
    return list(zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True))
