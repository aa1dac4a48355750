"""prompts: dataset rows → templated, tokenized prompts in Arrow (`train/`, `dev/`, `eval/`) and counts (`counts.json`).

With tools, prompts list them and end with the observation of their environment; `tools.json` has the tools.

A prompt_id is a hash of the row's content, so it is the same in every run and in any order. A training row whose prompt
is also a held-out one is dropped, and a row of dev whose prompt is also in eval. Dropped rows are counted by reason.
Images are in `images/`, each once; a prompt names them by digest.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

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
        config: of the stage.
        assets: folder that `stage-assets` wrote.
        output: folder to write.

    Raises:
        UserError: a column is missing, no prompt is left, a prompt would begin with two BOS tokens, a template fails,
            or the longest prompt and completion exceed the model's context.
    """
    places = asset_files.read(assets, "model", "eval", "train", weights=False)
    model = Path(places["model"]["path"])
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    rows: dict[str, list[Row]] = {}
    counts: dict[str, dict[str, int]] = {}
    held_out: dict[Identity, str] = {}
    hf_config = read_json(model / "config.json")
    model_inputs.check_images(config, hf_config, str(model))
    processor = vision.load_processor(model, config.model.trust_remote_code) if config.dataset.shows_images else None
    with ExitStack() as stack:
        uses_tools = config.rollout.uses_tools
        pool = stack.enter_context(resets.pool_of(config.rollout)) if uses_tools else None
        several = isinstance(config.rollout.environment, dict)
        templater = Templater(config.dataset, tokenizer, policy.stop_ids(model, tokenizer), pool, several, processor)
        for name in reversed(config.dataset.parts):  # training rows come last
            source_rows = read_rows(config.dataset.parts[name], places[name]["path"])
            if vision.takes_images(hf_config) and not config.dataset.shows_images:
                images.check_named(source_rows, places[name]["path"])
            rows[name], counts[name] = _part(name, templater, source_rows, places[name]["path"], held_out)
            held_out |= {_identity(row): name for row in rows[name]}
    longest = max(len(row["prompt_ids"]) for part in rows.values() for row in part)
    model_inputs.check_context(config, hf_config, longest, str(model))
    with atomic_folder(output) as temporary:
        for name, part in rows.items():
            _save(part, temporary / name)
        write_json(temporary / COUNTS, counts)
        if uses_tools:
            write_json(temporary / TOOLS, templater.tools)
        if config.dataset.image_column is not None:
            _save_images(config.dataset.image_column, templater, rows, temporary)
        write_manifest(temporary, assets=lineage.assets_digest(assets))
    for name in config.dataset.parts:
        say(f"prompts/{name}: " + ", ".join(f"{count} {reason}" for reason, count in counts[name].items()))


def _part(
    name: str, templater: Templater, rows: list[Row], path: str, held_out: dict[Identity, str]
) -> tuple[list[Row], dict[str, int]]:
    """Templates one part of the dataset, without duplicates and prompts of `held_out`, which names their parts.

    Returns:
        Its rows, and the numbers of rows read, kept, and dropped by reason.
    """
    dataset = templater.dataset
    if dataset.image_column is not None:
        templater.single &= not any(isinstance(row.get(dataset.image_column), list) for row in rows)
    counts: Counter[str] = Counter(rows=len(rows), kept=0)
    prompt_rows: list[Row] = []
    ids: set[str] = set()
    check_columns(rows[0], dataset, path)
    check_names(rows[0], dataset, path)
    for prompt_row in track(templater.prompt_rows(rows, path), f"templating {name}", len(rows)):
        if len(prompt_row["prompt_ids"]) > dataset.max_prompt_length:
            counts["too long"] += 1
        elif prompt_row["prompt_id"] in ids:
            counts["duplicates"] += 1
        elif other := held_out.get(_identity(prompt_row)):
            counts[f"also in {other}"] += 1
        else:
            ids.add(prompt_row["prompt_id"])
            prompt_rows.append(prompt_row)
    counts["kept"] = len(prompt_rows)
    if not prompt_rows:
        why = ", ".join(f"{count} {reason}" for reason, count in counts.items() if reason not in ("rows", "kept"))
        raise UserError(
            f"{path}: no prompt is left in dataset.{name} ({why}); raise dataset.max_prompt_length or check the columns"
        )
    return prompt_rows, dict(counts)


def _identity(row: Row) -> Identity:
    """What makes two prompts one: their token ids and images."""
    return tuple(row["prompt_ids"]), tuple(row.get(image_store.IDS, ()))


def _save_images(column: str, templater: Templater, rows: dict[str, list[Row]], folder: Path) -> None:
    """Writes the images of the rows that were kept."""
    of_rows = [row[image_store.IDS] for part in rows.values() for row in part]
    digests = dict.fromkeys(digest for ids in of_rows for digest in ids)
    files = {digest: templater.files[digest] for digest in digests}
    image_store.write(folder, files, image_store.About(column, templater.single, max(map(len, of_rows))))
    say(f"prompts/images: {len(files)} images, {sum(map(len, files.values())) / 1e6:.1f} MB")


def _save(rows: list[Row], folder: Path) -> None:
    """Writes Arrow with `datasets`; token ids are int32, other columns keep their types."""
    import datasets

    table = as_dataset(rows)
    for name in ("prompt_ids", image_store.PLACEHOLDERS):
        if name in table.column_names:
            table = table.cast_column(name, datasets.List(datasets.Value("int32")))
    if image_store.IDS in table.column_names:
        table = table.cast_column(image_store.IDS, datasets.List(datasets.Value("string")))
    table.save_to_disk(str(folder))
