"""The tables that stages exchange: their schemas, and the code that reads and writes them.

A table is a Parquet file with an explicit schema (so an all-null column in one shard keeps its type) and a footer with
schema version, kind, run, round, shard, policy digest, seed, package version and a digest of the file. Rows are ordered
by (prompt, sample), so one group is K consecutive rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rloo_pipeline.artifacts import episodes, image_store
from rloo_pipeline.artifacts.files import REMEDY, atomic_write, check_facts
from rloo_pipeline.errors import UserError, naming, one_line
from rloo_pipeline.runtime import import_shims
from rloo_pipeline.version import with_commit

import_shims.prepare_arrow()

SCHEMA_VERSION = "4"
DIGEST = "digest"
"""Footer key with the hex BLAKE3 of the file, which is computed with zeros in place of this digest."""
MARK, ZEROS = b"blake3:", b"0" * 64
"""Prefix of the digest in the file, and the placeholder that the digest replaces."""
required = partial(pa.field, nullable=False)
"""Makes a column without nulls."""
KEYS = [required("prompt_id", pa.string()), required("sample", pa.int32())]

ROLLOUTS = pa.schema(
    [
        *KEYS,
        required("prompt_ids", pa.list_(pa.int32())),
        required("completion_ids", pa.list_(pa.int32())),
        required("completion", pa.string()),
        required("sampling_logps", pa.list_(pa.float32())),
        required("finish_reason", pa.string()),
        required("seed", pa.int64()),
    ]
)
EPISODES = pa.schema(
    [
        *ROLLOUTS,
        required("loss_mask", pa.list_(pa.bool_())),
        required("turns", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("role", pa.string())]))),
        required("messages", pa.string()),
        pa.field("environment_reward", pa.float64()),
        pa.field("environment_state", pa.string()),
        required("tool_calls", pa.int32()),
        required("tool_failures", pa.int32()),
    ]
)
"""Rollouts with tools or an environment: `artifacts/episodes.py` says how the columns fit together. `turns` index
completion_ids; `messages` is a JSON list of the messages after the prompt, in TRL's form; `environment_state` is JSON.
`tool_failures` counts those of `tool_calls` that were answered by an error."""
WITH_IMAGES = pa.schema([*ROLLOUTS, required(image_store.IDS, pa.list_(pa.string()))])
"""Rollouts of prompts with images, whose digests they have."""
EXPERTS = "routed_experts"
"""Column with the experts that vLLM chose, layer by layer, for every token of prompt and completion but the last."""
WITH_EXPERTS = pa.schema([*ROLLOUTS, pa.field(EXPERTS, pa.list_(pa.uint16()))])
"""Rollouts with `rollout.router_replay`."""
CARRIED, SEGMENTS = "carried", "segments"
BUDGET = "budget"
"""`finish_reason` of a completion that `rollout.token_budget` has cut and the next round continues."""
IN_SEGMENTS = pa.schema(
    [
        *ROLLOUTS,
        pa.field(SEGMENTS, pa.list_(pa.struct([("end", pa.int32()), ("policy_round", pa.int32())]))),
        pa.field(CARRIED, pa.bool_()),
    ]
)
"""Rollouts with `rollout.token_budget`. `segments` tells, in the order of completion_ids, where each segment ends and
which policy sampled it. `carried` is true for groups with an unfinished completion: `read` leaves them out, and the
next round continues them (`read_carried`)."""
REFERENCE = pa.schema([*KEYS, required("reference_logps", pa.list_(pa.float32()))])
TEACHER = pa.schema([*KEYS, required("teacher_logps", pa.list_(pa.float32()))])
TOP_IDS, TOP_LOGPS = "top_ids", "top_logps"
WITH_TOP = pa.schema([*TEACHER, pa.field(TOP_IDS, pa.list_(pa.int32())), pa.field(TOP_LOGPS, pa.list_(pa.float32()))])
"""With `algorithm.teacher.top_k`: K ids and log-probs for each sampled token, position by position, likeliest first."""
TRAIN = pa.schema(
    [
        *KEYS,
        pa.field("reward", pa.float64()),
        pa.field("kl", pa.float32()),
        required("advantage", pa.float32()),
        pa.field("ratio", pa.float32()),
        required("clipped", pa.bool_()),
        required("masked", pa.bool_()),
    ]
)
TOOLS = "tools"
"""Footer key of rollouts with tools: the names of all tools, as JSON."""
SCORED = [pa.field("reward", pa.float64()), pa.field("seconds", pa.float32()), pa.field("error", pa.string())]
"""Columns of a table of scores, besides the keys and one column per reward function."""
WEIGHTS = "weights"
"""Footer key of score tables: the weights of the reward functions, as JSON."""
SCORES = "scores/"
"""Prefix of a reward function's column, since the function may be named like a column of the dataset."""


def score_column(function: str) -> str:
    """The column with the scores of a reward function; `reward` is the weighted sum of all."""
    return function if function == "reward" else SCORES + function


def scores_schema(functions: Sequence[str]) -> pa.Schema:
    """Schema of scores: one nullable column per reward function, their weighted sum, scoring seconds and errors."""
    return pa.schema([*KEYS, *(pa.field(score_column(name), pa.float64()) for name in functions), *SCORED])


def part_schema(function: str) -> pa.Schema:
    """Schema of the scores of one reward function that ran in a job of its own, before `score` merges them."""
    score = pa.field(score_column(function), pa.float64())
    return pa.schema([*KEYS, score, pa.field("seconds", pa.float64()), pa.field("error", pa.string())])


def weights_of(scores: pa.Table) -> dict[str, float]:
    """The weights of the reward functions that a table of scores was made with; empty if its footer has none."""
    return dict(json.loads(footer(scores).get(WEIGHTS, "{}")))


def weighted_sums(weights: Sequence[float], columns: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """Σ w·r of each row over the functions that gave a score. None means "does not apply" and never counts as 0.

    Args:
        weights: one per function; the sum is taken in this order.
        columns: the scores of each function.

    Returns:
        The sums; NaN, meaning unscorable, if no function with a non-zero weight gave a score.
    """
    total = np.zeros(len(columns[0]))
    scorable = np.zeros(len(columns[0]), bool)
    for weight, column in zip(weights, columns, strict=True):
        values = np.array(column, float)  # None is NaN
        counts = ~np.isnan(values) & (weight != 0)
        total[counts] += weight * values[counts]
        scorable |= counts
    total[~scorable] = np.nan
    return total


def functions_of(table: pa.Table) -> list[str]:
    """Names of the reward functions whose scores are in a table, of scores or of evaluated completions."""
    return [name.removeprefix(SCORES) for name in table.column_names if name.startswith(SCORES)]


_common: ContextVar[Mapping[str, object]] = ContextVar("common", default={})  # noqa: B039, never changed in place


@contextmanager
def common_facts(**about: object) -> Iterator[None]:
    """Puts facts into the footers of all tables that the block writes."""
    token = _common.set(about)
    try:
        yield
    finally:
        _common.reset(token)


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
    facts = {"schema_version": SCHEMA_VERSION, "kind": kind, "package_version": with_commit(), **_common.get(), **about}
    return table.cast(schema).replace_schema_metadata({key: str(value) for key, value in facts.items()})


def save(path: Path, table: pa.Table) -> None:
    """Writes a table that `build` returned, atomically, with its digest."""
    dictionaries = [name for name in REPEATED if name in table.column_names]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", use_dictionary=dictionaries) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({DIGEST: (MARK + ZEROS).decode()})
    content = memoryview(sink.getvalue())
    footer = (
        len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    )  # a file ends with its footer's length and PAR1
    start = footer + bytes(content[footer:]).rindex(MARK + ZEROS) + len(MARK)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines((content[:start], _digest(content, start), content[start + len(ZEROS) :]))


def _digest(content: bytes | memoryview, start: int) -> bytes:
    """Hex BLAKE3 of a file, computed with zeros in place of its digest, which begins at `start`."""
    import blake3

    hasher = blake3.blake3(memoryview(content)[:start])
    hasher.update(ZEROS)
    hasher.update(memoryview(content)[start + len(ZEROS) :])
    return str(hasher.hexdigest()).encode()


def read(path: Path, kind: str, columns: Sequence[str] | None = None, **expected: object) -> pa.Table:
    """Reads a table, or some of its columns, without the groups that the next round continues (`carried`).

    Args:
        path: Parquet file.
        kind: kind of table that the footer must name.
        columns: names of the columns to read; all by default. A table of an older version may lack some.
        expected: facts that the footer must have, such as the round and the digest of the policy.

    Returns:
        The table; its footer has the file's digest.

    Raises:
        UserError: the file is missing, truncated, damaged, or of a different kind or schema version, its footer has
            different facts, a group lacks a completion, a number is not finite, an episode contradicts itself, or the
            reward is not the weighted sum of the scores.
    """
    columns = [*columns, CARRIED] if columns else columns
    table = _read(path, kind, columns, **expected)
    if CARRIED not in table.column_names:
        return table
    return table.filter(pc.invert(table[CARRIED])).drop_columns(CARRIED)


def read_carried(path: Path, **expected: object) -> list[dict[str, Any]]:
    """The rows of a table of rollouts that the next round continues; the errors are the same as for `read`."""
    table = _read(path, "rollouts", None, **expected)
    return list(table.filter(table[CARRIED]).to_pylist()) if CARRIED in table.column_names else []


def _read(path: Path, kind: str, columns: Sequence[str] | None, **expected: object) -> pa.Table:
    """A table with all of its rows; arguments and errors are the same as for `read`."""
    try:
        with naming(path):
            content = path.read_bytes()
    except FileNotFoundError:
        helps = "restore it from a copy, or run the stage that writes it first"
        raise UserError(f"{path}: no such table; {helps}") from None
    start = content.rfind(MARK) + len(MARK)
    written = content[start : start + len(ZEROS)]
    if start >= len(MARK) and _digest(content, start) != written:
        raise UserError(f"{path}: truncated or damaged (its digest differs); {REMEDY}")
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        table = file.read([name for name in columns if name in file.schema_arrow.names] if columns else None)
        facts = footer(table)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: truncated or damaged Parquet file ({one_line(error)}); {REMEDY}") from error
    if facts.get("kind") != kind:
        raise UserError(f"{path}: holds '{facts.get('kind', 'another table')}', not '{kind}'; {REMEDY}")
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {facts.get('schema_version')}, but this program reads {SCHEMA_VERSION}; {REMEDY}"
        )
    if start < len(MARK):
        raise UserError(f"{path}: has no digest, so it was changed since it was written; {REMEDY}")
    check_facts(path, facts, {key: str(value) for key, value in expected.items()})
    _check_values(path, table, kind)
    _check_reward(path, table)
    episodes.check(path, table)
    return table.replace_schema_metadata({**facts, DIGEST: written.decode()})


def _check_values(path: Path, table: pa.Table, kind: str) -> None:
    """Checks that groups are complete and numbers finite, except for ratio and KL of an update, which may overflow.

    Raises:
        UserError: a group is incomplete, or a number is not finite.
    """
    if "sample" in table.column_names and len(table):
        samples = table["sample"].to_numpy()
        group = np.arange(samples.max() + 1)
        if len(samples) % len(group) or (samples.reshape(-1, len(group)) != group).any():
            raise UserError(f"{path}: its rows are not groups of {len(group)} completions; {REMEDY}")
    for name in sorted(set(table.column_names) - ({"kl", "ratio"} if kind == "train" else set())):
        values = table[name] if not pa.types.is_list(table[name].type) else pc.list_flatten(table[name])
        if pa.types.is_floating(values.type) and pc.all(pc.is_finite(values)).as_py() is False:
            raise UserError(f"{path}: {name} has values that are not finite; {REMEDY}")


def _check_reward(path: Path, table: pa.Table) -> None:
    """Checks that `reward` in a table of scores is the weighted sum of the functions' scores.

    Raises:
        UserError: `reward` is a different number.
    """
    weights = weights_of(table)
    if not weights or {"reward", *map(score_column, weights)} - set(table.column_names):
        return
    sums = weighted_sums(list(weights.values()), [table[score_column(name)].to_pylist() for name in weights])
    if not np.array_equal(sums, np.array(table["reward"].to_pylist(), float), equal_nan=True):
        raise UserError(f"{path}: its column reward is not the weighted sum of its functions' scores; {REMEDY}")


def footer(table: pa.Table) -> dict[str, str]:
    """The facts in a table's footer."""
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def facts_in(path: Path) -> dict[str, str]:
    """The facts in a file's footer; reads nothing else of the file."""
    metadata = pq.read_metadata(path).metadata or {}
    return {key.decode(): value.decode() for key, value in metadata.items() if key != b"ARROW:schema"}


def facts_about(rollouts: pa.Table) -> dict[str, str]:
    """Footer facts for a table about one shard of rollouts, including the digest of that shard."""
    facts = footer(rollouts)
    return {key: facts[key] for key in ("run", "round", "shard", "seed")} | {"rollouts": facts[DIGEST]}


def is_episodes(rollouts: pa.Table) -> bool:
    """True if rows are episodes; without `loss_mask`, the model sampled every token of a completion."""
    return "loss_mask" in rollouts.column_names


def lengths(column: pa.ChunkedArray) -> list[int]:
    """Length of the list in each row of a column."""
    return list(episodes.lengths(column).tolist())


def sampled_lengths(rollouts: pa.Table) -> list[int]:
    """Number of sampled tokens in each completion, without the tokens of tools and users."""
    return lengths(rollouts["sampling_logps" if is_episodes(rollouts) else "completion_ids"])


def read_all(paths: Sequence[Path], kind: str, **expected: object) -> pa.Table:
    """The shards of one table, all of one policy, concatenated in the order given; arguments and errors as for
    `read`.
    """
    return pa.concat_tables(read_shards(paths, kind, **expected), promote_options="default")


def read_shards(paths: Sequence[Path], kind: str, **expected: object) -> list[pa.Table]:
    """The shards that `read_all` concatenates."""
    shards: list[pa.Table] = []
    for number, path in enumerate(paths):
        shards.append(read(path, kind, None, shard=number, **expected))
        expected |= {"policy": footer(shards[0]).get("policy")}
    return shards


def check_aligned(
    left: pa.Table, right: pa.Table, path: Path, others: str = "the rollouts", remedy: str = REMEDY
) -> None:
    """Checks that two tables have the same (prompt_id, sample) in the same order.

    Raises:
        UserError: the rows in `path` are not those of `others`; `remedy` says what to delete.
    """
    keys = [field.name for field in KEYS]
    if not left.select(keys).equals(right.select(keys)):
        raise UserError(f"{path}: the rows are not those of {others}; {remedy}")
