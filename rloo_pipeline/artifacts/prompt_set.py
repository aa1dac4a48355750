"""Storage of templated prompts: the stage `prompts` writes them, other stages read them.

Arrow gives every object of a column the union of their keys, and has no integers beyond 64 bits. Columns that hold
objects with different keys, or such integers, are stored as JSON, so their rows come back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.artifacts import image_store
from rloo_pipeline.artifacts.manifest import read_verified, verify_manifest
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError, one_line

if TYPE_CHECKING:
    from datasets import Dataset

OBSERVATION = "environment_observation"
"""Column with the text that `reset` of an environment returned, which ends the prompt."""
TOOLS = "tools.json"
"""File beside the sets: `ToolSets`."""
DEEPEST = 32
"""Maximum nesting of lists and objects in Arrow; `pyarrow.ipc` reads 64 levels, and an object takes two."""
TYPES = {
    "prompt_ids": pa.list_(pa.int32()),
    image_store.PLACEHOLDERS: pa.list_(pa.int32()),
    image_store.IDS: pa.list_(pa.string()),
}
"""Types of the columns that `prompts` adds. `datasets` would write JSON twice if columns were cast afterwards."""
PACKED = 10_000
"""Number of rows that become Arrow at once."""
ToolSets = Mapping[str, list[JSON]]
"""Schemas of the tools that prompts list, by the environment of a row, or under "" if all rows have the same."""
UNSTORABLE = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""Exceptions for values that Arrow cannot hold."""


class PromptSet:
    """`prompts/train`, `prompts/dev` or `prompts/eval`: one row per prompt, in the order of the dataset."""

    def __init__(self, folder: Path) -> None:
        """Memory-maps the Arrow files; rows are decoded when they are read.

        Raises:
            UserError: the folder is not what the stage `prompts` writes.
        """
        self.folder = folder
        verify_manifest(folder.parent, lambda name: name.startswith(f"{folder.name}/"))
        shards = sorted(folder.glob("*.arrow"))
        if not shards:
            raise UserError(f"{folder}: no prompts; run the stage `prompts` first")
        try:
            self.table = image_store.read_arrow(shards)
        except pa.ArrowException as error:
            raise UserError(
                f"{folder}: truncated or damaged Arrow file ({error}); delete {folder.parent} and run again"
            ) from error
        self.about_images = image_store.about(folder.parent)
        self.images = image_store.ImageStore(folder.parent) if self.about_images else None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def longest(self) -> int:
        """Length of the longest prompt in tokens."""
        return int(pc.max(pc.list_value_length(self.table["prompt_ids"])).as_py())

    @property
    def columns(self) -> list[str]:
        """Names of the columns: those of the dataset, including its images, and those that `prompts` added."""
        own = {image_store.IDS, image_store.PLACEHOLDERS} if self.about_images else set()
        names = [name for name in self.table.column_names if name not in own]
        return [*names, self.about_images.column] if self.about_images else names

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        """The rows at these indices with all their columns; images are decoded."""
        return [self._with_images(row) for row in rows_of(self.table.take(pa.array(indices, pa.int64())))]

    def _with_images(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row with its images decoded, in the dataset's own column for them."""
        if self.about_images is None or self.images is None:
            return row
        images = [self.images.image(digest) for digest in row[image_store.IDS]]
        column = next(iter(images), None) if self.about_images.single else images
        return {**row, self.about_images.column: column, image_store.PIXELS: images}

    def texts(self, prompt_ids: list[str]) -> list[str]:
        """The text of each of these prompts; messages of a chat are `role: content`, one per line.

        Raises:
            UserError: a prompt_id is not in this set.
        """
        rows = self.by_id(prompt_ids)
        return [_text(rows[prompt_id]["prompt"]) for prompt_id in prompt_ids]

    def by_id(self, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Maps each of these prompt_ids to its row.

        Raises:
            UserError: a prompt_id is not in this set.
        """
        unique_ids = pa.array(sorted(set(prompt_ids)), self.table["prompt_id"].type)
        selected = self.table.filter(pc.is_in(self.table["prompt_id"], value_set=unique_ids))
        rows = {row["prompt_id"]: self._with_images(row) for row in rows_of(selected)}
        for prompt_id in prompt_ids:
            if prompt_id not in rows:
                raise UserError(
                    f"{self.folder}: no prompt {prompt_id}, though the rollouts have "
                    "it; delete the rollouts and run again"
                )
        return rows


def as_dataset(rows: Sequence[Mapping[str, Any]], place: str = "the prompts") -> Dataset:
    """Builds the stored dataset from rows of prompts, with the columns of the first row.

    Args:
        rows: prompts with their columns.
        place: file that the rows come from, for messages.

    Raises:
        UserError: a column cannot be stored.
    """
    import datasets

    columns = {name: _storable_column([row.get(name) for row in rows], TYPES.get(name)) for name in rows[0]}
    try:
        return datasets.Dataset.from_dict(columns)
    except UNSTORABLE as error:
        name = next(name for name, column in columns.items() if not _is_storable(name, column))
        raise UserError(f"{place}: column '{name}' cannot be stored ({one_line(error)}); simplify it") from error


def packed(rows: Iterable[Mapping[str, Any]], place: str) -> Dataset:
    """The same as `as_dataset`, for more rows than memory holds as Python's objects."""
    import datasets

    rest, tables, digest = iter(rows), list[pa.Table](), datasets.fingerprint.Hasher()
    while some := [*islice(rest, PACKED)]:
        tables.append(as_dataset(some, place).data.table)
        digest.update(tables[-1])  # `datasets` would hold two copies of all rows to compute a fingerprint
    columns: dict[str, pa.ChunkedArray] = {}
    for name in tables[0].column_names:
        columns[name] = _joined([table.select([name]) for table in tables], place)
        tables = [table.drop_columns(name) for table in tables]  # frees their memory
    return datasets.Dataset(pa.table(columns), fingerprint=digest.hexdigest())


def _joined(parts: Sequence[pa.Table], place: str) -> pa.ChunkedArray:
    """The column of these tables in one piece; if its types differ, as if all values were stored at once."""
    if all(part.schema.equals(parts[0].schema) for part in parts):
        return pa.concat_tables(parts).combine_chunks()[0]
    return as_dataset([row for part in parts for row in rows_of(part)], place).data.table[0]


def _is_storable(name: str, column: Any) -> bool:
    import datasets

    try:
        datasets.Dataset.from_dict({name: column})
    except UNSTORABLE:
        return False
    return True


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a stored table, with the values of JSON columns decoded."""
    names = [field.name for field in table.schema if isinstance(field.type, pa.JsonType)]
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows if names else ():
        row.update({name: json.loads(row[name]) for name in names if row[name] is not None})
    return rows


def _storable_column(values: list[Any], own_type: pa.DataType | None) -> list[Any] | pa.Array:
    """A column for `datasets`: our own type, or JSON if Arrow's types would change or cannot hold it."""
    if own_type is not None:
        return pa.array(values, own_type)
    if not _keys_differ(values):
        try:
            if str(pa.array(values).type).count("<") <= DEEPEST:
                return values
        except UNSTORABLE:
            pass
    try:
        texts = [None if value is None else json.dumps(value) for value in values]
    except TypeError:  # a generator may give dates and the like, which only Arrow can store
        return values
    return pa.array(texts, pa.json_())


def _keys_differ(values: Iterable[Any]) -> bool:
    """True if objects among these values, or at one position within them, have different keys."""
    given = (value for value in values if value is not None)
    first = next(given, None)
    if isinstance(first, list | tuple):
        lists = (value for value in chain([first], given) if isinstance(value, list | tuple))
        return _keys_differ(item for value in lists for item in value)
    if not isinstance(first, dict):
        return False
    objects = [value for value in chain([first], given) if isinstance(value, dict)]
    return any(value.keys() != first.keys() for value in objects) or any(
        _keys_differ([value[key] for value in objects]) for key in first
    )


def tools_of(tools: ToolSets, row: Mapping[str, Any]) -> list[JSON]:
    """The schemas of the tools in the prompt of a row of the dataset; none in a run without tools."""
    return tools.get("") or tools.get(str(row.get("environment")), [])


def tool_names(prompts: Path) -> list[str]:
    """The names of all tools in the prompts of a folder, sorted."""
    return sorted({tool["function"]["name"] for tools in tool_sets(prompts).values() for tool in tools})


def tool_sets(prompts: Path) -> ToolSets:
    """The tools of the prompts in a folder that the stage `prompts` wrote."""
    return read_verified(prompts, TOOLS) or {}


def held_out_part(prompts: Path) -> Path:
    """The folder of the prompts that a run measures itself on: `dev` if there are rows to choose by, else `eval`."""
    return prompts / ("dev" if (prompts / "dev").exists() else "eval")


def _text(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


def content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message whose content may be parts, with `[image]` for an image, or null beside calls of tools."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join("[image]" if part.get("type") == "image" else str(part.get("text") or "") for part in content)
