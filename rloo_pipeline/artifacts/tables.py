"""The tables that stages exchange: their schemas, and the only code that reads and writes them.

A table is a Parquet file with an explicit schema (an all-null column in one shard keeps its type), page checksums, and
a footer that says what it is of: schema version, kind, run, round, shard, policy digest, seed, package version.
Rows are ordered by (prompt, sample): one group is K neighbouring rows.
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

import_shims.before_arrow()

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
"""What a table of scores has beside keys and functions."""


def scores_schema(functions: Sequence[str]) -> pa.Schema:
    """Scores: one nullable column a reward function, their weighted sum, what scoring took, and what went wrong."""
    fields = [pa.field(name, pa.float64()) for name in functions]
    return pa.schema([*KEYS, *fields, *SCORED])


def part_schema(function: str) -> pa.Schema:
    """What one reward function gave, which a job of its own scored: the stage `score` puts it into its table."""
    return pa.schema(
        [*KEYS, pa.field(function, pa.float64()), pa.field("seconds", pa.float64()), pa.field("error", pa.string())]
    )


def completions_schema(functions: Sequence[str]) -> pa.Schema:
    """An evaluation's completions: a rollout and its scores in one row."""
    return pa.schema([*ROLLOUTS, *list(scores_schema(functions))[len(KEYS) :]])


REPEATED = ("prompt_id", "finish_reason", "error")
"""Columns that say the same again and again: each word is written once."""


def write(
    path: Path, rows: pa.Table | Sequence[Mapping[str, object]], schema: pa.Schema, kind: str, **about: object
) -> None:
    """Writes a whole table or none; `about` goes into the footer."""
    save(path, make(rows, schema, kind, **about))


def make(rows: pa.Table | Sequence[Mapping[str, object]], schema: pa.Schema, kind: str, **about: object) -> pa.Table:
    """A table as `read` gives it, once it is saved; `about` goes into the footer."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=schema)
    facts = {"schema_version": SCHEMA_VERSION, "kind": kind, "package_version": __version__, **about}
    return table.cast(schema).replace_schema_metadata({key: str(value) for key, value in facts.items()})


def save(path: Path, table: pa.Table) -> None:
    """Writes a table that `make` made, whole or not at all."""
    dictionaries = [name for name in REPEATED if name in table.column_names]
    with atomic_write(path) as beside:
        pq.write_table(table, beside, compression="zstd", write_page_checksum=True, use_dictionary=dictionaries)


def read(path: Path, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a table (or some of its columns) that must be of `kind`.

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
    facts = about(table)
    if facts.get("kind") != kind:
        raise UserError(f"{path}: holds '{facts.get('kind', 'another table')}', not '{kind}'")
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {facts.get('schema_version')}, this program "
            f"reads {SCHEMA_VERSION}; delete it and run again"
        )
    return table


def about(table: pa.Table) -> dict[str, str]:
    """What a table's footer says it is of."""
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def lengths(column: pa.ChunkedArray) -> list[int]:
    """Of the lists in a column, row by row."""
    found: list[int] = column.combine_chunks().value_lengths().to_pylist()
    return found


def read_all(paths: Sequence[Path], kind: str) -> pa.Table:
    """The shards of one table, laid end to end in the order given."""
    return pa.concat_tables([read(path, kind) for path in paths])


def check_aligned(left: pa.Table, right: pa.Table, what: str) -> None:
    """Makes sure that two tables speak of the same completions in the same order.

    Raises:
        UserError: they do not.
    """
    keys = [field.name for field in KEYS]
    if not left.select(keys).equals(right.select(keys)):
        raise UserError(f"{what}: the rows are not those of the rollouts; delete the folder and run again")
