"""Rows of a dataset → rows of a prompt set: prompt, prompt_ids, prompt_id, with tools or images if a run has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import image_store
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import OBSERVATION, as_dataset, rows_of
from rloo_pipeline.config import JSON, TABLE_COLUMNS, Dataset
from rloo_pipeline.data import images
from rloo_pipeline.data.prompting import encode, prompt_of
from rloo_pipeline.data.rows import Row
from rloo_pipeline.data.tool_template import ToolTemplate
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import resets

if TYPE_CHECKING:
    from rloo_pipeline.user_code.pool import EnvironmentPool


class Templater:
    """Turns rows of a dataset into rows of a prompt set."""

    def __init__(self, dataset: Dataset, model: Policy, pool: EnvironmentPool | None = None) -> None:
        """Loads the tokenizer, and in a run with images the processor.

        Args:
            dataset: section of the configuration.
            model: the model.
            pool: processes for tools and environments; None in a run without tools.
        """
        self.dataset, self.tokenizer, self.pool = dataset, model.tokenizer, pool
        self.processor = model.processor if dataset.shows_images else None
        self.files: dict[str, bytes] = {}
        """Image files of all rows so far, by digest."""
        self.single = True
        """True if the rows have one image each, not lists of images."""
        self.template = ToolTemplate(model.tokenizer, dataset, model.stop_ids)
        self.tools: dict[str, list[JSON]] = {}
        """Schemas of the tools, by the environment of a row (empty if all rows have the same)."""

    def prompt_rows(self, rows: Sequence[Row], path: str) -> Iterator[Row]:
        """Yields the rows with all their columns and prompt, prompt_ids and prompt_id.

        Args:
            rows: rows of the dataset.
            path: file of the rows, for messages.

        Raises:
            UserError: a prompt cannot be made, or the chat template cannot be used with tools.
        """
        locations = [f"{path}, row {number}" for number in range(len(rows))]
        if self.pool is None:
            for row, location in zip(rows, locations, strict=True):
                if self.dataset.image_column is not None:
                    yield self._with_images(row, location, self.dataset.image_column)
                    continue
                prompt_row = self._begin(row, location)
                yield {**prompt_row, "prompt_ids": encode(prompt_row["prompt"], self.dataset, self.tokenizer, location)}
            return
        prompt_rows = [self._begin(row, location) for row, location in zip(rows, locations, strict=True)]
        stored = rows_of(as_dataset(prompt_rows, path).data.table)  # as later stages read them
        texts = resets.observations(self.pool, stored)
        for row, text, location in zip(prompt_rows, texts, locations, strict=True):
            prompt = _with_observation(row["prompt"], text, location)
            ids = encode(prompt, self.dataset, self.tokenizer, location, self._tools(self.pool, row))
            yield {**row, "prompt": prompt, "prompt_ids": ids, OBSERVATION: text}

    def _with_images(self, row: Row, location: str, column: str) -> Row:
        """Replaces the images of a row by digests; prompt_ids get an id for each part of an image, as for the model."""
        files = images.images_of(row[column], f"{location}, column '{column}'")
        digests = [image_store.digest(file) for file in files]
        self.files |= dict(zip(digests, files, strict=True))
        prompt_row = self._begin({**row, column: digests}, location)
        del prompt_row[column]
        pixels = [image_store.decode(file, location) for file in files]
        ids = images.encode(prompt_row["prompt"], pixels, self.dataset, self.processor, location)
        return {**prompt_row, **ids._asdict(), image_store.IDS: digests}

    def _begin(self, row: Row, location: str) -> Row:
        """A row with its prompt and prompt_id, a hash of its content."""
        prompt = prompt_of(row, self.dataset, location)
        columns = {
            key: value for key, value in row.items() if key != self.dataset.prompt_column or key not in TABLE_COLUMNS
        }
        identity = hashlib.sha256(
            json.dumps([row, prompt], sort_keys=True, default=str, ensure_ascii=False).encode()
        ).hexdigest()
        return {**columns, "prompt_id": identity[:16], "prompt": prompt}

    def _tools(self, pool: EnvironmentPool, row: Row) -> list[JSON]:
        """The schemas of the tools in a row's prompt; checks the template once per environment."""
        name = pool.environment_of(row) or ""
        if name not in self.tools:
            self.tools[name] = pool.schemas(row)
            self.template.check(self.tools[name])
        return self.tools[name]


def _with_observation(prompt: Any, text: str, location: str) -> Any:
    """Appends the observation of `reset` to the last message of a prompt."""
    if isinstance(prompt, str) or not isinstance(prompt[-1].get("content"), str):
        raise UserError(
            f"{location}: rollout.tools and rollout.environment need a prompt of messages with a text at the end; set "
            "dataset.user_prompt, or name a column of messages in dataset.prompt_column"
        )
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]
