"""Makes the prompts of a run from the rows of its data: templated, within their limit, without duplicates."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rloo_pipeline.artifacts import image_store, vision
from rloo_pipeline.data import images
from rloo_pipeline.data.prompting import check_columns, check_names
from rloo_pipeline.data.rows import Row
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.templating import Templater
from rloo_pipeline.runtime.progress import track

Identity = tuple[tuple[int, ...], tuple[str, ...]]


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
        """Kept rows of each part."""
        self.counts: dict[str, dict[str, int]] = {}
        """For each part, the numbers of rows read, kept, and dropped by reason."""
        self.held_out: dict[Identity, str] = {}

    @property
    def order(self) -> list[str]:
        """Names of the parts, in the order in which to add them; training rows come last."""
        return [*reversed(self.dataset.parts)]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row["prompt_ids"]) for part in self.rows.values() for row in part)

    def add(self, name: str, rows: list[Row], path: str) -> None:
        """Templates a part.

        Args:
            name: name of the part.
            rows: rows of its data.
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
        kept: list[Row] = []
        ids: set[str] = set()
        shortest: int | None = None
        check_columns(rows[0], dataset, path)
        check_names(rows[0], dataset, path)
        for row in track(self.templater.prompt_rows(rows, path), f"templating {name}", len(rows)):
            length = len(row["prompt_ids"])
            shortest = min(length, shortest or length)
            if length > dataset.max_prompt_length:
                counts["too long"] += 1
            elif row["prompt_id"] in ids:
                counts["duplicates"] += 1
            elif other := self.held_out.get(identity(row)):
                counts[f"also in {other}"] += 1
            else:
                ids.add(row["prompt_id"])
                kept.append(row | {"prompt_ids": array("i", row["prompt_ids"])})  # a list has up to 40 bytes a token
        counts["kept"] = len(kept)
        if not kept:
            raise UserError(_nothing_left(name, counts, path, dataset.max_prompt_length, shortest))
        self.rows[name], self.counts[name] = kept, dict(counts)
        if name != "train":
            self.held_out |= {identity(row): name for row in kept}


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
        advice = f"training prompts must not be held-out ones, so give {name} rows that are not in {others}"
    return f"{path}: no prompt is left in dataset.{name} ({shown(why)}); {advice}"


def identity(row: Row) -> Identity:
    """The identity of a prompt: its token ids and images."""
    return tuple(row["prompt_ids"]), tuple(row.get(image_store.IDS, ()))
