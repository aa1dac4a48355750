"""prompts: dataset rows → templated, tokenized prompts in Arrow (`train/`, `dev/`, `eval/`) and counts (`counts.json`).

With tools, prompts list them and end with the observation of their environment; `tools.json` has the tools.

A prompt_id is a hash of the row's content, so it is the same in every run and in any order. A training row whose prompt
is also a held-out one is dropped, and a row of dev whose prompt is also in eval. Dropped rows are counted by reason.
Images are in `images/`, each once; a prompt names them by digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import image_store, lineage, policy, vision
from rloo_pipeline.artifacts.files import atomic_folder, read_json, write_json
from rloo_pipeline.artifacts.manifest import write_manifest
from rloo_pipeline.artifacts.prompt_set import TOOLS, as_dataset
from rloo_pipeline.config import Config
from rloo_pipeline.data import images
from rloo_pipeline.data.prompting import check_columns, check_names
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import model_inputs
from rloo_pipeline.rollout import resets
from rloo_pipeline.rollout.templating import Templater
from rloo_pipeline.runtime.progress import say, track

COUNTS = "counts.json"
Identity = tuple[tuple[int, ...], tuple[str, ...]]


def prompts(config: Config, assets: Path, output: Path) -> None:
    """Writes the prompts of a run.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote.
        output: folder to write.

    Raises:
        UserError: a column is missing, no prompt is left, a prompt would begin with two BOS tokens, a template fails,
            or the longest prompt and completion exceed the model's context.
    """
    places = asset_files.read(assets, "model", "eval", "train", weights=False)
    model = Path(places["model"]["path"])
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    hf_config = read_json(model / "config.json")
    model_inputs.check_images(config, hf_config, str(model))
    processor = vision.load_processor(model, config.model.trust_remote_code) if config.dataset.shows_images else None
    with ExitStack() as stack:
        uses_tools = config.rollout.uses_tools
        pool = stack.enter_context(resets.pool_of(config.rollout)) if uses_tools else None
        several = isinstance(config.rollout.environment, dict)
        templater = Templater(config.dataset, tokenizer, policy.stop_ids(model, tokenizer), pool, several, processor)
        parts = PromptParts(templater, hf_config)
        for name in parts.order:
            path = places[name]["path"]
            parts.add(name, read_rows(config.dataset.parts[name], path), path)
    model_inputs.check_context(config, hf_config, parts.longest, str(model))
    with atomic_folder(output) as temporary:
        for name, part in parts.rows.items():
            as_dataset(part, places[name]["path"]).save_to_disk(str(temporary / name))
        write_json(temporary / COUNTS, parts.counts)
        if uses_tools:
            write_json(temporary / TOOLS, templater.tools)
        if config.dataset.image_column is not None:
            _save_images(config.dataset.image_column, templater, parts.rows, temporary)
        write_manifest(temporary, assets=lineage.assets_digest(assets))
    for name in config.dataset.parts:
        say(f"prompts/{name}: {shown(parts.counts[name])}")


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
        """Names of the parts in the order to add them; training rows come last."""
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
            path: path of its data, for messages.

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
                kept.append(row)
        counts["kept"] = len(kept)
        if not kept:
            raise UserError(_nothing_left(name, counts, path, dataset.max_prompt_length, shortest))
        self.rows[name], self.counts[name] = kept, dict(counts)
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
        advice = f"training prompts must not be held-out ones, so give {name} other rows than {others}"
    return f"{path}: no prompt is left in dataset.{name} ({shown(why)}); {advice}"


def identity(row: Row) -> Identity:
    """The identity of a prompt: its token ids and images."""
    return tuple(row["prompt_ids"]), tuple(row.get(image_store.IDS, ()))


def _save_images(column: str, templater: Templater, rows: dict[str, list[Row]], folder: Path) -> None:
    """Writes the images of the rows that were kept."""
    of_rows = [row[image_store.IDS] for part in rows.values() for row in part]
    digests = dict.fromkeys(digest for ids in of_rows for digest in ids)
    files = {digest: templater.files[digest] for digest in digests}
    image_store.write(folder, files, image_store.About(column, templater.single, max(map(len, of_rows))))
    say(f"prompts/images: {len(files)} images, {sum(map(len, files.values())) / 1e6:.1f} MB")
