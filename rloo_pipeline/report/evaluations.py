"""Completions of an evaluation, and pairs of completions from the warm start and the final policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_artifact


def read_completions(run: Path, name: str, kind: str = "completions", columns: Sequence[str] | None = None) -> pa.Table:
    """The completions of the evaluation `name`; the greedy ones with kind `greedy`.

    Raises:
        UserError: the table is missing or damaged, or belongs to another evaluation or policy than the summary.
    """
    folder = run / "evaluation" / name
    policy = read_artifact(folder / "summary.json", evaluated=name)["policy"]
    return tables.read(folder / f"{kind}.parquet", kind, columns, evaluated=name, policy=policy)


def read_pair(run: Path, kind: str = "completions") -> tuple[pa.Table, pa.Table]:
    """The warm start's completions and the final policy's.

    Raises:
        UserError: as `read_completions`, or they are not of the same prompts.
    """
    before, after = (read_completions(run, name, kind) for name in ("warmstart", "final"))
    others, path = (run / "evaluation" / name / f"{kind}.parquet" for name in ("warmstart", "final"))
    tables.check_aligned(before, after, path, str(others), "delete both and run again")
    return before, after
