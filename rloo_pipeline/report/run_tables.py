"""Reads the tables that the report shows: completions of one evaluation or of two, and of a round."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import round_tables, tables
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.config import Rollout


def read_completions(run: Path, name: str, kind: str = "completions", columns: Sequence[str] | None = None) -> pa.Table:
    """Reads the completions of the evaluation `name`, or its greedy ones with the kind `greedy`.

    Raises:
        UserError: the table is missing or damaged, or belongs to a different evaluation or policy than the summary.
    """
    folder = run / "evaluation" / name
    policy = read_artifact(folder / "summary.json", evaluated=name)["policy"]
    return tables.read(folder / f"{kind}.parquet", kind, columns, evaluated=name, policy=policy)


def read_pair(run: Path, kind: str = "completions") -> tuple[pa.Table, pa.Table]:
    """Reads the completions of the warm start and of the final policy.

    Raises:
        UserError: as for `read_completions`, or the two have different prompts.
    """
    before, after = (read_completions(run, name, kind) for name in ("warmstart", "final"))
    others, path = (run / "evaluation" / name / f"{kind}.parquet" for name in ("warmstart", "final"))
    tables.check_aligned(before, after, path, str(others), "delete both and run again")
    return before, after


def read_round(folder: Path, settings: Rollout) -> pa.Table:
    """Joins the existing tables of a round, with one row per completion: rollouts, scores and values of the update.

    Args:
        folder: results/<run>/rounds/<round>.
        settings: the run's settings.

    Returns:
        The columns of rollouts and scores and, once it exists, of train.parquet; the latter are null for completions
        that the update did not use.

    Raises:
        UserError: a table is missing or damaged, or the tables do not belong together.
    """
    paths = round_tables.files_of(folder, "rollouts", settings)
    files = RoundFiles(paths, [round_tables.scores_beside(path) for path in paths])
    sampled = files.read(round=int(folder.name))
    rollouts = sampled.rollouts
    columns = {name: table[name] for table in (rollouts, sampled.scores) for name in table.column_names}
    if (folder / "train.parquet").exists():
        trained = tables.read(folder / "train.parquet", "train", round=int(folder.name))
        index_of = {key: index for index, key in enumerate(_keys(trained))}
        order = pa.array([index_of.get(key) for key in _keys(rollouts)], type=pa.int64())
        columns |= {name: trained[name].take(order) for name in trained.column_names if name not in columns}
    return pa.table(columns)


def _keys(table: pa.Table) -> list[tuple[str, int, int]]:
    """Prompt and sample of each row, and the number of earlier rows with the same two. With `rollout.token_budget`,
    groups of the same prompt that began in different rounds can end in the same one.
    """
    seen = Counter[tuple[str, int]]()
    keys = []
    for pair in zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True):
        keys.append((*pair, seen[pair]))
        seen[pair] += 1
    return keys
