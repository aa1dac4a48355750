"""The tables that stages exchange: their schemas, and the code that reads and writes them.

A table is a Parquet file with an explicit schema (so an all-null column in one shard keeps its type), page checksums,
and a footer with schema version, kind, run, round, shard, policy digest, seed and package version. Rows are ordered by
(prompt, sample), so one group is K consecutive rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rloo_pipeline import __version__
from rloo_pipeline.artifacts.files import atomic_write
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import import_shims

import_shims.prepare_arrow()

SCHEMA_VERSION = "2"
KEYS = [pa.field("prompt_id", pa.string(), nullable=False), pa.field("sample", pa.int32(), nullable=False)]

ROLLOUTS = pa.schema(
    [
        *KEYS,
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
        pa.field("sampling_logps", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
    ]
)
REFERENCE = pa.schema([*KEYS, pa.field("reference_logps", pa.list_(pa.float32()), nullable=False)])
TRAIN = pa.schema(
    [
        *KEYS,
        pa.field("reward", pa.float64()),
        pa.field("kl", pa.float32()),
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("ratio", pa.float32()),
        pa.field("clipped", pa.bool_(), nullable=False),
        pa.field("masked", pa.bool_(), nullable=False),
    ]
)
SCORED = [
    pa.field("reward", pa.float64()),
    pa.field("seconds", pa.float32()),
    pa.field("error", pa.string()),
]
"""Columns of a table of scores, besides the keys and one column per reward function."""


def scores_schema(functions: Sequence[str]) -> pa.Schema:
    """Schema of scores: one nullable column per reward function, their weighted sum, scoring seconds and errors."""
    fields = [pa.field(name, pa.float64()) for name in functions]
    return pa.schema([*KEYS, *fields, *SCORED])


def part_schema(function: str) -> pa.Schema:
    """Schema of the scores of one reward function that ran in a job of its own, before `score` merges them."""
    return pa.schema(
        [*KEYS, pa.field(function, pa.float64()), pa.field("seconds", pa.float64()), pa.field("error", pa.string())]
    )


def completions_schema(functions: Sequence[str]) -> pa.Schema:
    """Schema of an evaluation's completions: rollout and scores in one row."""
    return pa.schema([*ROLLOUTS, *list(scores_schema(functions))[len(KEYS) :]])


REPEATED = ("prompt_id", "finish_reason", "error")
"""Columns with few distinct values, which are dictionary-encoded."""


def write(
    path: Path, rows: pa.Table | Sequence[Mapping[str, object]], schema: pa.Schema, kind: str, **about: object
) -> None:
    """Writes a table atomically, with `about` in its footer."""
    save(path, build(rows, schema, kind, **about))


def build(rows: pa.Table | Sequence[Mapping[str, object]], schema: pa.Schema, kind: str, **about: object) -> pa.Table:
    """The table that `read` returns once this one is saved, with `about` in its footer."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=schema)
    facts = {"schema_version": SCHEMA_VERSION, "kind": kind, "package_version": __version__, **about}
    return table.cast(schema).replace_schema_metadata({key: str(value) for key, value in facts.items()})


def save(path: Path, table: pa.Table) -> None:
    """Writes a table that `build` returned, atomically."""
    dictionaries = [name for name in REPEATED if name in table.column_names]
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True, use_dictionary=dictionaries)


def read(path: Path, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a table of `kind`, or some of its columns.

    Raises:
        UserError: the file is missing, truncated, damaged, of another kind or of another schema version.
    """
    try:
        table = pq.read_table(
            path, columns=list(columns) if columns else None, page_checksum_verification=True, partitioning=None
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such table; run the stage that writes it first") from None
    except (pa.ArrowException, OSError) as error:
        what = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: truncated or damaged Parquet file ({what}); delete it and run again") from error
    facts = footer(table)
    if facts.get("kind") != kind:
        raise UserError(f"{path}: holds '{facts.get('kind', 'another table')}', not '{kind}'")
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {facts.get('schema_version')}, this program "
            f"reads {SCHEMA_VERSION}; delete it and run again"
        )
    return table


def footer(table: pa.Table) -> dict[str, str]:
    """The facts in a table's footer."""
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def lengths(column: pa.ChunkedArray) -> list[int]:
    """Length of the list in each row of a column."""
    sizes: list[int] = column.combine_chunks().value_lengths().to_pylist()
    return sizes


def read_all(paths: Sequence[Path], kind: str) -> pa.Table:
    """The shards of one table, concatenated in the order given."""
    return pa.concat_tables([read(path, kind) for path in paths])


def check_aligned(left: pa.Table, right: pa.Table, what: str) -> None:
    """Checks that two tables have the same (prompt_id, sample) in the same order.

    Raises:
        UserError: they have not; `what` names the wrong table.
    """
    keys = [field.name for field in KEYS]
    if not left.select(keys).equals(right.select(keys)):
        raise UserError(f"{what}: the rows are not those of the rollouts; delete the folder and run again")
