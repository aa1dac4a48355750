"""The templated prompts of a run, as the later stages read them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.errors import UserError


class PromptSet:
    """`prompts/train` or `prompts/eval`: one row a prompt, in the dataset's order."""

    def __init__(self, folder: Path) -> None:
        """Maps the Arrow files into memory; nothing is decoded before it is asked for.

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
        """Tokens of the longest prompt."""
        lengths = pc.list_value_length(self.table["prompt_ids"])
        return int(pc.max(lengths).as_py())

    def rows(self, places: list[int]) -> list[dict[str, Any]]:
        """Some rows with all their columns."""
        rows: list[dict[str, Any]] = self.table.take(places).to_pylist()
        return rows

    def by_id(self, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
        """The rows with these prompt_ids.

        Raises:
            UserError: one of them is not here.
        """
        wanted = pa.array(sorted(set(prompt_ids)))
        found = self.table.filter(pc.is_in(self.table["prompt_id"], value_set=wanted)).to_pylist()
        rows = {row["prompt_id"]: row for row in found}
        for prompt_id in prompt_ids:
            if prompt_id not in rows:
                raise UserError(
                    f"{self.folder}: no prompt {prompt_id}, though the rollouts have "
                    "it; delete the rollouts and run again"
                )
        return rows
