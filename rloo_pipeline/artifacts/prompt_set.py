"""Reads the templated prompts that the stage `prompts` wrote."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.errors import UserError


class PromptSet:
    """`prompts/train` or `prompts/eval`: one row per prompt, in the order of the dataset."""

    def __init__(self, folder: Path) -> None:
        """Memory-maps the Arrow files; rows are decoded when they are read.

        Raises:
            UserError: the folder is not what the stage `prompts` writes.
        """
        self.folder = folder
        shards = sorted(folder.glob("*.arrow"))
        if not shards:
            raise UserError(f"{folder}: no prompts; run the stage `prompts` first")
        try:
            self.table = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(shard))).read_all() for shard in shards)
        except pa.ArrowException as error:
            raise UserError(
                f"{folder}: truncated or damaged Arrow file ({error}); delete {folder.parent} and run again"
            ) from error

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def longest(self) -> int:
        """Length of the longest prompt in tokens."""
        lengths = pc.list_value_length(self.table["prompt_ids"])
        return int(pc.max(lengths).as_py())

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        """The rows at these indices with all their columns."""
        rows: list[dict[str, Any]] = self.table.take(indices).to_pylist()
        return rows

    def by_id(self, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Maps each of these prompt_ids to its row.

        Raises:
            UserError: a prompt_id is not in this set.
        """
        unique_ids = pa.array(sorted(set(prompt_ids)))
        selected = self.table.filter(pc.is_in(self.table["prompt_id"], value_set=unique_ids)).to_pylist()
        rows = {row["prompt_id"]: row for row in selected}
        for prompt_id in prompt_ids:
            if prompt_id not in rows:
                raise UserError(
                    f"{self.folder}: no prompt {prompt_id}, though the rollouts have "
                    "it; delete the rollouts and run again"
                )
        return rows
