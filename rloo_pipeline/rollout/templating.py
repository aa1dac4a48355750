"""Makes the prompts of a run from the rows of its data: templated, within their limit, without duplicates.

A row of a dataset becomes a row of a prompt set, with prompt, prompt_ids and prompt_id, and tools or images if the run
has them.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rloo_pipeline.artifacts import image_store, vision
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import OBSERVATION, as_dataset, rows_of
from rloo_pipeline.config import JSON, TABLE_COLUMNS, Dataset
from rloo_pipeline.data import images
from rloo_pipeline.data.prompting import check_columns, check_names, check_question, encode, prompt_of, wording
from rloo_pipeline.data.rows import Row
from rloo_pipeline.data.tool_template import ToolTemplate
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import resets
from rloo_pipeline.runtime.progress import track
from rloo_pipeline.user_code.pool import EnvironmentPool

Identity = tuple[tuple[int, ...] | str, tuple[str, ...]]


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
        self.template = ToolTemplate(model, dataset)
        self.tools: dict[str, list[JSON]] = {}
        """Schemas of the tools, by the environment of a row (empty if all rows have the same)."""

    def prompt_rows(self, rows: Iterable[Row], path: str) -> Iterator[Row]:
        """Yields the rows with all their columns and prompt, prompt_ids and prompt_id.

        Args:
            rows: rows of the dataset.
            path: file of the rows, for messages.

        Raises:
            UserError: a prompt cannot be made, or the chat template cannot be used with tools.
        """
        located = ((row, f"{path}, row {number}") for number, row in enumerate(rows))
        if self.pool is None:
            for row, location in located:
                if self.dataset.image_column is not None:
                    yield self._with_images(row, location, self.dataset.image_column)
                    continue
                prompt_row = self._begin(row, location)
                check_question(prompt_row["prompt"], location)
                yield {**prompt_row, "prompt_ids": encode(prompt_row["prompt"], self.dataset, self.tokenizer, location)}
            return
        begun = [(self._begin(row, location), location) for row, location in located]
        stored = rows_of(as_dataset([row for row, _ in begun], path).data.table)  # as later stages read them
        texts = resets.observations(self.pool, stored)
        for (row, location), text in zip(begun, texts, strict=True):
            prompt = _with_observation(row["prompt"], text, location)
            check_question(prompt, location)
            ids = encode(prompt, self.dataset, self.tokenizer, location, self._tools(self.pool, row))
            yield {**row, "prompt": prompt, "prompt_ids": ids, OBSERVATION: text}

    def _with_images(self, row: Row, location: str, column: str) -> Row:
        """Replaces the images of a row by digests; prompt_ids get an id for each part of an image, as for the model."""
        found = images.images_of(row[column], f"{location}, column '{column}'")
        digests = [image_store.digest(file) for file, _ in found]
        self.files |= {digest: file for digest, (file, _) in zip(digests, found, strict=True)}
        prompt_row = self._begin({**row, column: digests}, location)
        check_question(prompt_row["prompt"], location)
        del prompt_row[column]
        pixels = [image for _, image in found]
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


class PromptParts:
    """Makes the prompts of a run, part by part: templates rows, and drops duplicates, long and held-out prompts.

    `rloo check` and `rloo init` use it to count prompts.
    """

    def __init__(self, templater: Templater, hf_config: Mapping[str, Any] | None = None) -> None:
        """Starts without parts.

        Args:
            templater: makes prompts from rows.
            hf_config: the model's config.json; None for a model without images.
        """
        self.templater, self.dataset = templater, templater.dataset
        self.hf_config = hf_config or {}
        self.rows: dict[str, list[Row]] = {}
        """Kept rows of each part that was added."""
        self.longest = 0
        """Tokens of the longest prompt."""
        self.counts: dict[str, dict[str, int]] = {}
        """For each part, the numbers of rows read, kept, and dropped by reason."""
        self.held_out: dict[Identity, str] = {}

    @property
    def order(self) -> list[str]:
        """Names of the parts, in the order in which to add them; training rows come last."""
        return [*reversed(self.dataset.parts)]

    def add(self, name: str, rows: list[Row], path: str) -> None:
        """Templates a part, and keeps its rows in memory; see `kept`."""
        self.rows[name] = [*self.kept(name, [*rows], path)]

    def kept(self, name: str, rows: list[Row], path: str) -> Iterator[Row]:
        """Templates a part and yields the rows to keep.

        Args:
            name: name of the part.
            rows: rows of its data; emptied, so that memory does not hold both them and their prompts.
            path: path of the data, for messages.

        Raises:
            UserError: a column is missing, a prompt cannot be made, or no prompt is left.
        """
        dataset = self.dataset
        if vision.takes_images(self.hf_config) and not dataset.shows_images:
            images.check_named(rows, path)
        if dataset.image_column is not None:
            self.templater.single &= not any(isinstance(row.get(dataset.image_column), list) for row in rows)
        counts: Counter[str] = Counter(rows=len(rows), kept=0)
        ids: set[str] = set()
        identities: set[Identity] = set()
        shortest: int | None = None
        check_columns(rows[0], dataset, path)
        check_names(rows[0], dataset, path)
        for row in track(self.templater.prompt_rows(_drained(rows), path), f"templating {name}", len(rows)):
            length = len(row["prompt_ids"])
            shortest = min(length, shortest or length)
            if length > dataset.max_prompt_length:
                counts["too long"] += 1
            elif row["prompt_id"] in ids:
                counts["duplicates"] += 1
            elif other := self.held_out.get(identity(row)) or self.held_out.get(_worded(row)):
                counts[f"also in {other}"] += 1
            else:
                ids.add(row["prompt_id"])
                self.longest = max(self.longest, length)
                if name != "train":
                    identities |= {identity(row), _worded(row)}
                yield row | {"prompt_ids": array("i", row["prompt_ids"])}  # a list has up to 40 bytes a token
        counts["kept"] = len(ids)
        if not ids:
            raise UserError(_nothing_left(name, counts, path, dataset.max_prompt_length, shortest))
        self.counts[name] = dict(counts)
        self.held_out |= dict.fromkeys(identities, name)


def _drained(rows: list[Row]) -> Iterator[Row]:
    """Yields the rows in order and removes them."""
    rows.reverse()
    while rows:
        yield rows.pop()


def shown(counts: Mapping[str, int]) -> str:
    """The numbers of rows by reason, as text."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def _nothing_left(name: str, counts: Mapping[str, int], path: str, limit: int, shortest: int | None) -> str:
    """The error message for a part in which no prompt is left."""
    why = {reason: count for reason, count in counts.items() if reason not in ("rows", "kept")}
    if "too long" in why:
        advice = f"raise dataset.max_prompt_length ({limit}): the shortest prompt has {shortest} tokens"
    else:
        others = " and ".join(reason.removeprefix("also in ") for reason in why)
        advice = (
            f"training prompts must not be held-out ones, so give {name} other prompts than {others} (a number in the "
            "text is enough where an environment hides the task)"
        )
    return f"{path}: no prompt is left in dataset.{name} ({shown(why)}); {advice}"


def identity(row: Row) -> Identity:
    """The identity of a prompt: its token ids and images."""
    return tuple(row["prompt_ids"]), tuple(row.get(image_store.IDS, ()))


def _worded(row: Row) -> Identity:
    """The identity of a prompt that may differ from others in white space, but neither in tools nor in images."""
    return f"{wording(row['prompt'])} {row.get('environment')}", tuple(row.get(image_store.IDS, ()))
